//! Group descriptors and bitmaps (Documentation/filesystems/ext4/group_descr.rst,
//! bitmaps.rst).

use crate::bytes::{Fields, set_bits};
use crate::checksum::chained;
use crate::layout::{BLOCK, DESCRIPTOR, LOST_INODE, Layout};

/// The inode bitmap is not initialised: all inodes are free (`EXT4_BG_INODE_UNINIT`).
const INODES_UNUSED: u16 = 0x1;
/// The block bitmap is not initialised: it is computed (`EXT4_BG_BLOCK_UNINIT`).
const BLOCKS_UNUSED: u16 = 0x2;
/// The inode table is zeroed, so the kernel need not zero it later (`EXT4_BG_INODE_ZEROED`).
const TABLE_ZERO: u16 = 0x4;

/// Which blocks of a group are in use.
pub(crate) fn block_bitmap(layout: &Layout, group: u64) -> Vec<u8> {
    let mut bitmap = vec![0; BLOCK as usize];
    set_bits(&mut bitmap, 0, layout.used_of(group) as usize);
    // Blocks beyond the end of the disk are marked as in use.
    set_bits(
        &mut bitmap,
        layout.blocks_of(group) as usize,
        8 * BLOCK as usize,
    );
    bitmap
}

/// Which inodes of the first group are in use.
pub(crate) fn inode_bitmap(layout: &Layout) -> Vec<u8> {
    let mut bitmap = vec![0; BLOCK as usize];
    set_bits(&mut bitmap, 0, LOST_INODE as usize);
    set_bits(
        &mut bitmap,
        layout.inodes_per_group as usize,
        8 * BLOCK as usize,
    );
    bitmap
}

/// Whether this group's block bitmap is on the disk: that of the first group, because it is in use,
/// and that of the last, because tools require it.
pub(crate) fn has_block_bitmap(layout: &Layout, group: u64) -> bool {
    group == 0 || group == layout.groups - 1
}

/// All descriptors, in whole blocks.
pub(crate) fn descriptors(layout: &Layout, seed: u32) -> Vec<u8> {
    let mut all = vec![0; (layout.descriptor_blocks * BLOCK) as usize];
    for (group, bytes) in (0..layout.groups).zip(all.chunks_exact_mut(DESCRIPTOR as usize)) {
        descriptor(layout, seed, group, bytes);
    }
    all
}

fn descriptor(layout: &Layout, seed: u32, group: u64, out: &mut [u8]) {
    let (mut flags, mut used_inodes, mut folders) = (TABLE_ZERO, 0, 0);
    if group == 0 {
        (used_inodes, folders) = (LOST_INODE, 2);
        let inodes = &inode_bitmap(layout)[..layout.inodes_per_group as usize / 8];
        out.put32_halves(0x1a, 0x3a, chained(seed, inodes));
    } else {
        flags |= INODES_UNUSED;
    }
    if has_block_bitmap(layout, group) {
        let checksum = chained(seed, &block_bitmap(layout, group));
        out.put32_halves(0x18, 0x38, checksum);
    } else {
        flags |= BLOCKS_UNUSED;
    }
    let free_inodes = layout.inodes_per_group as u32 - used_inodes;
    out.put64_halves(0x0, 0x20, layout.block_bitmap(group));
    out.put64_halves(0x4, 0x24, layout.inode_bitmap(group));
    out.put64_halves(0x8, 0x28, layout.inode_table(group));
    let free = layout.blocks_of(group) - layout.used_of(group);
    out.put32_halves(0xc, 0x2c, free as u32);
    out.put32_halves(0xe, 0x2e, free_inodes);
    out.put32_halves(0x10, 0x30, folders);
    out.put16(0x12, flags);
    // The unused inodes at the end of the group's table (`bg_itable_unused`).
    out.put32_halves(0x1c, 0x32, free_inodes);
    // The checksum covers the descriptor with the checksum field as zero.
    let checksum = chained(chained(seed, &(group as u32).to_le_bytes()), out);
    out.put16(0x1e, checksum as u16);
}
