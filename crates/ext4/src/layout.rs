//! The layout of a new file system.
//!
//! A group is 128 MiB. Some groups begin with a copy of the superblock and of all group
//! descriptors, unless copies are off; then each has two bitmaps and its part of the inode table.
//! In the first group the root folder, `lost+found` and the journal follow.

/// Bytes of a block.
pub const BLOCK: u64 = 4096;
/// Blocks of a group: the number of bits in one block.
pub const BLOCKS_PER_GROUP: u64 = 8 * BLOCK;
/// Bytes of an inode.
pub const INODE: u64 = 256;
/// Bytes of a group descriptor.
pub const DESCRIPTOR: u64 = 64;
/// Inodes in a block.
const INODES_PER_BLOCK: u64 = BLOCK / INODE;
/// Bytes of disk for each inode.
const BYTES_PER_INODE: u64 = 16384;
/// Least data blocks of the last group; a smaller group is left out.
const LEAST_DATA: u64 = 50;

/// The smallest disk that can have a file system.
pub const LEAST_BYTES: u64 = 2 << 20;
/// The largest: block numbers of 32 bits, which every tool can read.
pub const MOST_BYTES: u64 = 16 << 40;

/// The folder `/`.
pub const ROOT_INODE: u32 = 2;
/// The journal.
pub const JOURNAL_INODE: u32 = 8;
/// `lost+found`, the first that isn't reserved.
pub const LOST_INODE: u32 = 11;

/// The position of every structure of a new file system, in blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// Blocks of the file system; the disk may have a few more.
    pub blocks: u64,
    /// Groups.
    pub groups: u64,
    /// Blocks of all group descriptors.
    pub descriptor_blocks: u64,
    /// Inodes of each group.
    pub inodes_per_group: u64,
    /// Blocks of the journal; 0 for none.
    pub journal_blocks: u64,
    /// Whether there are copies of the superblock and descriptors.
    pub copies: bool,
}

impl Layout {
    /// The layout for a disk of `bytes` bytes; `None` if it is too small or too large.
    pub fn of(bytes: u64, copies: bool) -> Option<Layout> {
        if !(LEAST_BYTES..=MOST_BYTES).contains(&bytes) {
            return None;
        }
        let mut layout = Layout {
            blocks: bytes / BLOCK,
            groups: 0,
            descriptor_blocks: 0,
            inodes_per_group: 0,
            journal_blocks: 0,
            copies,
        };
        layout.divide();
        let last = layout.groups - 1;
        if last > 0 && layout.blocks_of(last) < layout.overhead(last) + LEAST_DATA {
            layout.blocks = last * BLOCKS_PER_GROUP;
            layout.divide();
        }
        layout.journal_blocks = match layout.blocks {
            0..4096 => 0,
            4096..32768 => 1024,
            32768..262144 => 4096,
            262144..524288 => 8192,
            _ => 16384,
        };
        Some(layout)
    }

    fn divide(&mut self) {
        self.groups = self.blocks.div_ceil(BLOCKS_PER_GROUP);
        self.descriptor_blocks = (self.groups * DESCRIPTOR).div_ceil(BLOCK);
        let in_group = self.blocks.min(BLOCKS_PER_GROUP);
        let inodes = in_group * BLOCK / BYTES_PER_INODE;
        self.inodes_per_group = inodes.max(1).next_multiple_of(INODES_PER_BLOCK);
    }

    /// The first block of a group.
    pub fn start_of(&self, group: u64) -> u64 {
        group * BLOCKS_PER_GROUP
    }

    /// Blocks of a group; the last may have fewer.
    pub fn blocks_of(&self, group: u64) -> u64 {
        (self.blocks - self.start_of(group)).min(BLOCKS_PER_GROUP)
    }

    /// Whether this group has a copy of the superblock and descriptors (`sparse_super`, or
    /// `sparse_super2` with none).
    pub fn has_copy(&self, group: u64) -> bool {
        if !self.copies {
            return group == 0;
        }
        let power_of = |base: u64| {
            let mut power = base;
            while power < group {
                power *= base;
            }
            power == group
        };
        group <= 1 || power_of(3) || power_of(5) || power_of(7)
    }

    fn copy_blocks(&self, group: u64) -> u64 {
        match self.has_copy(group) {
            true => 1 + self.descriptor_blocks,
            false => 0,
        }
    }

    /// The block bitmap of a group; its inode bitmap and inode table follow.
    pub fn block_bitmap(&self, group: u64) -> u64 {
        self.start_of(group) + self.copy_blocks(group)
    }

    /// The inode bitmap of a group.
    pub fn inode_bitmap(&self, group: u64) -> u64 {
        self.block_bitmap(group) + 1
    }

    /// The first block of a group's inode table.
    pub fn inode_table(&self, group: u64) -> u64 {
        self.block_bitmap(group) + 2
    }

    /// Blocks of a group's inode table.
    pub fn inode_table_blocks(&self) -> u64 {
        self.inodes_per_group / INODES_PER_BLOCK
    }

    /// Blocks of a group that hold no data.
    pub fn overhead(&self, group: u64) -> u64 {
        self.copy_blocks(group) + 2 + self.inode_table_blocks()
    }

    /// The block of the root folder.
    pub fn root_block(&self) -> u64 {
        self.overhead(0)
    }

    /// The block of `lost+found`.
    pub fn lost_block(&self) -> u64 {
        self.root_block() + 1
    }

    /// The first block of the journal.
    pub fn journal_start(&self) -> u64 {
        self.lost_block() + 1
    }

    /// Blocks in use in a group.
    pub fn used_of(&self, group: u64) -> u64 {
        let data = match group {
            0 => 2 + self.journal_blocks,
            _ => 0,
        };
        self.overhead(group) + data
    }

    /// Blocks free in all.
    pub fn free_blocks(&self) -> u64 {
        let used: u64 = (0..self.groups).map(|group| self.used_of(group)).sum();
        self.blocks - used
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn superblock_copies_are_in_the_sparse_super_groups() {
        let layout = Layout::of(1 << 40, true).unwrap();
        let copies: Vec<u64> = (0..130).filter(|group| layout.has_copy(*group)).collect();
        assert_eq!(copies, [0, 1, 3, 5, 7, 9, 25, 27, 49, 81, 125]);
    }

    #[test]
    fn metadata_fits_in_the_first_and_the_last_group() {
        let mut bytes = LEAST_BYTES;
        while bytes <= MOST_BYTES {
            for copies in [false, true] {
                let layout = Layout::of(bytes, copies).unwrap();
                let last = layout.groups - 1;
                for group in [0, last] {
                    assert!(
                        layout.used_of(group) < layout.blocks_of(group),
                        "{bytes}: {layout:?}"
                    );
                }
            }
            bytes += bytes / 7;
        }
    }
}
