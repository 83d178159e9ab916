//! Creates empty ext4 file systems with a few writes, whatever their size.
//!
//! A new file system of gibibytes has only a few kibibytes that are not zero; the rest is a hole in
//! a new file. `mke2fs` takes tens of milliseconds and is not installed everywhere; this takes a
//! fraction of a millisecond and needs no other program.
//!
//! * [`format()`]: creates a file system with [`Options`].
//! * [`inspect()`]: recognises a file system, and returns its size.
//! * [`layout`]: where each structure is.
//! * `superblock`, `groups`, `inodes`, `journal`: the structures, as bytes.
//! * `checksum`: their CRCs.
//!
//! Source: the kernel's Documentation/filesystems/ext4.

mod bytes;
mod checksum;
mod format;
mod groups;
mod inodes;
mod inspect;
mod journal;
pub mod layout;
mod options;
mod superblock;

pub use format::{FormatError, format};
pub use inspect::{Found, inspect};
pub use options::Options;
