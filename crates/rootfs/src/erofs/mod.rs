//! The EROFS image: uncompressed, file tails beside their inodes.
//!
//! ```text
//! block 0        superblock at byte 1024
//! block 1 …      whole blocks of files, then of large folders
//! meta block …   inodes, each with its extended attributes and its tail
//! ```
//!
//! Source: Linux `Documentation/filesystems/erofs.rst` and
//! `fs/erofs/erofs_fs.h`.

mod contents;
mod format;
mod metadata;

pub use contents::{ContentWriter, WriteError};
pub use format::{BLOCK_SIZE, xattr_body, xattr_index};
pub use metadata::finish;
