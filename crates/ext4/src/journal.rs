//! The journal's own superblock (Documentation/filesystems/ext4/journal.rst).
//! Its fields are big-endian.

use crate::layout::{BLOCK, Layout};

/// The first block of an empty journal.
pub(crate) fn superblock(layout: &Layout) -> Vec<u8> {
    let mut block = vec![0; BLOCK as usize];
    let fields = [
        (0x0, 0xc03b_3998), // magic
        (0x4, 4),           // a superblock of version 2
        (0xc, BLOCK as u32),
        (0x10, layout.journal_blocks as u32),
        (0x14, 1), // first block of the log
        (0x18, 1), // first transaction that is expected
        (0x40, 1), // file systems that use it
    ];
    for (offset, value) in fields {
        block[offset..offset + 4].copy_from_slice(&u32::to_be_bytes(value));
    }
    block
}
