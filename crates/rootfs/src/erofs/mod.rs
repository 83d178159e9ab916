//! EROFS images: uncompressed, with file tails beside their inodes.
//!
//! ```text
//! block 0        superblock at byte 1024, the root's inode at byte 1152
//! block 1 …      whole blocks of files, then of large folders
//! …              inodes, each with its extended attributes and its tail
//! ```
//!
//! Inode numbers count from the beginning of the image, so they stay valid when something is
//! appended. A child image has its own block 0, and its new data, folders and inodes behind its
//! parent's last block.
//!
//! A file with large holes, or one that shares parts with the parent's file, has a chunk table
//! instead of a run of blocks.
//!
//! Source: Linux `Documentation/filesystems/erofs.rst` and
//! `fs/erofs/erofs_fs.h`.

mod folder;
mod format;
mod inputs;
mod plan;
mod read;
mod write;

pub use format::{BLOCK_SIZE, xattr_body, xattr_index};
pub use inputs::{InputError, Inputs, ReadAt};
pub use plan::{Parent, Plan, PlanError};
pub use read::{ReadError, Readable};
pub use write::{WriteError, write};
