//! The EROFS image: uncompressed, file tails beside their inodes.
//!
//! ```text
//! block 0        superblock at byte 1024, the root's inode at byte 1152
//! block 1 …      whole blocks of files, then of large folders
//! …              inodes, each with its extended attributes and its tail
//! ```
//!
//! Inodes are counted from the beginning of the image, so their numbers hold
//! wherever more is appended. A child image has another block 0, and behind
//! its parent's last block what is new: data, folders, inodes.
//!
//! A file with large holes, or one that shares parts with the parent's, has a
//! table of chunks instead of a run of blocks.
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
