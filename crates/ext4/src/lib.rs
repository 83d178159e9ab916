//! Makes empty ext4 file systems, in a few writes and whatever their size.
//!
//! A file system of gibibytes consists of a few kibibytes when it is new: all
//! else is zero, and so a hole in a new file. `mke2fs` takes tens of
//! milliseconds for it and is not there everywhere; this takes a fraction of
//! one and needs nothing.
//!
//! * [`format()`]: makes one, as its [`Options`] say.
//! * [`inspect()`]: finds one, and says how large it is.
//! * [`layout`]: what lies where.
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
