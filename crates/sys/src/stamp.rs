//! Whether a file is still what it was.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

/// File metadata that changes whenever the contents change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    /// Device number of its file system.
    pub device: u64,
    /// Inode number.
    pub inode: u64,
    /// Bytes.
    pub size: u64,
    /// mtime and ctime, each in seconds and nanoseconds.
    pub times: [i64; 4],
}

impl Stamp {
    /// The stamp of a file with this metadata.
    pub fn of(data: &Metadata) -> Stamp {
        Stamp {
            device: data.dev(),
            inode: data.ino(),
            size: data.size(),
            times: [
                data.mtime(),
                data.mtime_nsec(),
                data.ctime(),
                data.ctime_nsec(),
            ],
        }
    }
}
