//! Creates a file system.

use crate::checksum;
use crate::layout::{BLOCK, LEAST_BYTES, Layout, MOST_BYTES};
use crate::options::Options;
use crate::{groups, inodes, journal, superblock};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use thiserror::Error;

/// Why no file system was created.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FormatError {
    /// The disk is too small or too large.
    #[error(
        "a disk of {0} bytes can't have an ext4 file system; it must have {LEAST_BYTES} to {MOST_BYTES} bytes"
    )]
    Size(u64),
    /// Existing contents would be lost, and would be treated as zeros.
    #[error("the file is not empty")]
    NotEmpty,
    /// It can't be written.
    #[error("the file system can't be written")]
    Write(#[source] io::Error),
}

/// Creates an empty file system in an empty file, which is extended to the length of the disk. The
/// file is not synced.
///
/// # Errors
///
/// If the disk is too small or too large, the file is not empty, or it can't be written.
pub fn format(file: &File, options: &Options) -> Result<(), FormatError> {
    let layout =
        Layout::of(options.bytes, options.copies).ok_or(FormatError::Size(options.bytes))?;
    let metadata = file.metadata().map_err(FormatError::Write)?;
    if metadata.len() != 0 {
        return Err(FormatError::NotEmpty);
    }
    write(file, options, &layout).map_err(FormatError::Write)
}

fn write(file: &File, options: &Options, layout: &Layout) -> io::Result<()> {
    file.set_len(options.bytes)?;
    let seed = checksum::seed(&options.uuid);
    let descriptors = groups::descriptors(layout, seed);

    // The first group up to its first inodes is one write.
    let mut head = vec![0; BLOCK as usize];
    let place = superblock::OFFSET..superblock::OFFSET + superblock::SIZE;
    head[place].copy_from_slice(&superblock::superblock(layout, options, 0));
    head.extend_from_slice(&descriptors);
    head.extend(groups::block_bitmap(layout, 0));
    head.extend(groups::inode_bitmap(layout));
    head.extend(inodes::table(layout, seed, options.created));
    file.write_all_at(&head, 0)?;

    let mut folders = inodes::root_folder(seed);
    folders.extend(inodes::lost_folder(seed));
    if layout.journal_blocks > 0 {
        folders.extend(journal::superblock(layout));
    }
    file.write_all_at(&folders, layout.root_block() * BLOCK)?;

    for group in 1..layout.groups {
        if layout.has_copy(group) {
            let mut copy = superblock::superblock(layout, options, group).to_vec();
            copy.resize(BLOCK as usize, 0);
            copy.extend_from_slice(&descriptors);
            file.write_all_at(&copy, layout.start_of(group) * BLOCK)?;
        }
        if groups::has_block_bitmap(layout, group) {
            let bitmap = groups::block_bitmap(layout, group);
            file.write_all_at(&bitmap, layout.block_bitmap(group) * BLOCK)?;
        }
    }
    Ok(())
}
