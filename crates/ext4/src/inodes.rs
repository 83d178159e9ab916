//! The inodes of a new file system and its folders' contents
//! (Documentation/filesystems/ext4/inodes.rst, ifork.rst, directory.rst).

use crate::bytes::Fields;
use crate::checksum::{chained, inode_seed};
use crate::layout::{BLOCK, INODE, JOURNAL_INODE, LOST_INODE, Layout, ROOT_INODE};

/// Bytes of an inode beyond the first 128 that are in use.
pub(crate) const EXTRA: u16 = 32;

const EXTENTS: u32 = 0x80000;
const FOLDER: u16 = 0o040000;
const FILE: u16 = 0o100000;

/// The extent tree of a file with one extent.
pub(crate) fn extents(start: u64, blocks: u64) -> [u8; 60] {
    let mut map = [0; 60];
    let out = map.as_mut_slice();
    out.put16(0x0, 0xf30a);
    out.put16(0x2, 1); // number of extents
    out.put16(0x4, 4); // capacity in extents
    // The extent: first block of the file, number of blocks, and first block on the disk.
    out.put16(0x10, blocks as u16);
    out.put16(0x12, (start >> 32) as u16);
    out.put32(0x14, start as u32);
    map
}

/// An inode of the new file system.
struct Entry {
    number: u32,
    mode: u16,
    links: u16,
    start: u64,
    blocks: u64,
}

/// The first blocks of the inode table, as far as inodes are in use.
pub(crate) fn table(layout: &Layout, seed: u32, created: u32) -> Vec<u8> {
    let mut entries = vec![
        Entry {
            number: ROOT_INODE,
            mode: FOLDER | 0o755,
            links: 3,
            start: layout.root_block(),
            blocks: 1,
        },
        Entry {
            number: LOST_INODE,
            mode: FOLDER | 0o700,
            links: 2,
            start: layout.lost_block(),
            blocks: 1,
        },
    ];
    if layout.journal_blocks > 0 {
        entries.push(Entry {
            number: JOURNAL_INODE,
            mode: FILE | 0o600,
            links: 1,
            start: layout.journal_start(),
            blocks: layout.journal_blocks,
        });
    }
    let mut table = vec![0; BLOCK as usize];
    for entry in entries {
        let place = (entry.number - 1) as usize * INODE as usize;
        entry.write(&mut table[place..place + INODE as usize], seed, created);
    }
    table
}

impl Entry {
    fn write(&self, out: &mut [u8], seed: u32, created: u32) {
        out.put16(0x0, self.mode);
        out.put32(0x4, (self.blocks * BLOCK) as u32);
        for time in [0x8, 0xc, 0x10, 0x90] {
            out.put32(time, created);
        }
        out.put16(0x1a, self.links);
        out.put32(0x1c, (self.blocks * BLOCK / 512) as u32);
        out.put32(0x20, EXTENTS);
        out.put(0x28, &extents(self.start, self.blocks));
        out.put16(0x80, EXTRA);
        let checksum = chained(inode_seed(seed, self.number), out);
        out.put32_halves(0x7c, 0x82, checksum);
    }
}

/// The directory block of `/`.
pub(crate) fn root_folder(seed: u32) -> Vec<u8> {
    let names = [
        (ROOT_INODE, "."),
        (ROOT_INODE, ".."),
        (LOST_INODE, "lost+found"),
    ];
    folder(seed, ROOT_INODE, &names)
}

/// The directory block of `/lost+found`.
pub(crate) fn lost_folder(seed: u32) -> Vec<u8> {
    folder(seed, LOST_INODE, &[(LOST_INODE, "."), (ROOT_INODE, "..")])
}

fn folder(seed: u32, inode: u32, names: &[(u32, &str)]) -> Vec<u8> {
    const TAIL: usize = 12;
    const IS_FOLDER: u8 = 2;
    const IS_CHECKSUM: u8 = 0xde;
    let mut block = vec![0; BLOCK as usize];
    let end = block.len() - TAIL;
    let mut place = 0;
    for (index, (number, name)) in names.iter().enumerate() {
        let length = match index + 1 == names.len() {
            true => end - place,
            false => (8 + name.len()).next_multiple_of(4),
        };
        block.put32(place, *number);
        block.put16(place + 4, length as u16);
        block[place + 6] = name.len() as u8;
        block[place + 7] = IS_FOLDER;
        block.put(place + 8, name.as_bytes());
        place += length;
    }
    let checksum = chained(inode_seed(seed, inode), &block[..end]);
    block.put16(end + 4, TAIL as u16);
    block[end + 7] = IS_CHECKSUM;
    block.put32(end + 8, checksum);
    block
}
