//! The superblock (Documentation/filesystems/ext4/super.rst).

use crate::bytes::Fields;
use crate::checksum::chained;
use crate::inodes;
use crate::layout::{
    BLOCK, BLOCKS_PER_GROUP, DESCRIPTOR, INODE, JOURNAL_INODE, LOST_INODE, Layout,
};
use crate::options::Options;

/// Bytes before the superblock on the disk.
pub(crate) const OFFSET: usize = 1024;
/// Bytes of a superblock.
pub(crate) const SIZE: usize = 1024;
pub(crate) const MAGIC: u16 = 0xef53;

/// Offsets of the fields that [`crate::inspect()`] reads.
pub(crate) mod field {
    pub(crate) const BLOCKS_LOW: usize = 0x4;
    pub(crate) const LOG_BLOCK_SIZE: usize = 0x18;
    pub(crate) const MAGIC: usize = 0x38;
    pub(crate) const INCOMPATIBLE: usize = 0x60;
    pub(crate) const BLOCKS_HIGH: usize = 0x150;
}

/// Block numbers have 64 bits.
pub(crate) const INCOMPATIBLE_64BIT: u32 = 0x80;

const HAS_JOURNAL: u32 = 0x4;
/// Only the groups named in the superblock have copies (`sparse_super2`); it names none.
const NAMED_COPIES: u32 = 0x200;
/// Extended attributes, directory indexes.
const COMPATIBLE: u32 = 0x8 | 0x20;
/// File types in directory entries, extents, block numbers of 64 bits.
const INCOMPATIBLE: u32 = 0x2 | 0x40 | INCOMPATIBLE_64BIT;
/// Few copies of the superblock, large files, huge files, many links to folders, large inodes,
/// checksums.
const READ_ONLY_COMPATIBLE: u32 = 0x1 | 0x2 | 0x8 | 0x20 | 0x40 | 0x400;

/// The superblock, or its copy in `group`.
pub(crate) fn superblock(layout: &Layout, options: &Options, group: u64) -> [u8; SIZE] {
    let mut bytes = [0; SIZE];
    let out = bytes.as_mut_slice();
    let inodes = layout.inodes_per_group * layout.groups;
    out.put32(0x0, inodes as u32);
    out.put64_halves(field::BLOCKS_LOW, field::BLOCKS_HIGH, layout.blocks);
    out.put64_halves(0xc, 0x158, layout.free_blocks());
    out.put32(0x10, (inodes - u64::from(LOST_INODE)) as u32);
    // Block size and cluster size, both as a shift of 1024.
    let shift = (BLOCK / 1024).ilog2();
    out.put32(field::LOG_BLOCK_SIZE, shift);
    out.put32(0x1c, shift);
    out.put32(0x20, BLOCKS_PER_GROUP as u32);
    out.put32(0x24, BLOCKS_PER_GROUP as u32);
    out.put32(0x28, layout.inodes_per_group as u32);
    out.put32(0x30, options.created);
    out.put16(0x36, u16::MAX); // no check after a number of mounts
    out.put16(field::MAGIC, MAGIC);
    out.put16(0x3a, 1); // clean
    out.put16(0x3c, 1); // continue after errors
    out.put32(0x40, options.created); // last checked
    out.put32(0x4c, 1); // revision with inodes of any size
    out.put32(0x54, LOST_INODE); // first that isn't reserved
    out.put16(0x58, INODE as u16);
    out.put16(0x5a, group as u16);
    let journal = layout.journal_blocks > 0;
    let mut compatible = COMPATIBLE;
    if journal {
        compatible |= HAS_JOURNAL;
    }
    if !layout.copies {
        compatible |= NAMED_COPIES;
    }
    out.put32(0x5c, compatible);
    out.put32(field::INCOMPATIBLE, INCOMPATIBLE);
    out.put32(0x64, READ_ONLY_COMPATIBLE);
    out.put(0x68, &options.uuid);
    let label = options.label.as_bytes();
    out.put(0x78, &label[..label.len().min(16)]);
    // The hash seed only needs to be unique.
    out.put(0xec, &options.hash_seed);
    out[0xfc] = 1; // half MD4
    out.put16(0xfe, DESCRIPTOR as u16);
    out.put32(0x100, 0x4 | 0x8); // attributes and ACLs of users
    out.put32(0x108, options.created);
    out.put16(0x15c, inodes::EXTRA);
    out.put16(0x15e, inodes::EXTRA);
    out.put32(0x160, 1); // hashes with signed characters
    out[0x175] = 1; // CRC-32C
    if journal {
        out.put32(0xe0, JOURNAL_INODE);
        out[0xfd] = 1; // a copy of its inode's map follows
        out.put(
            0x10c,
            &inodes::extents(layout.journal_start(), layout.journal_blocks),
        );
        out.put32(0x10c + 16 * 4, (layout.journal_blocks * BLOCK) as u32);
    }
    let checksum = chained(!0, &out[..SIZE - 4]);
    out.put32(SIZE - 4, checksum);
    bytes
}
