//! Which file, and how; what can be wrong with it.

use super::SECTOR;
use crate::virtio::queue::limit::RateLimit;
use std::io;
use std::path::PathBuf;
use thiserror::Error;

/// Bytes of a disk's identity (Virtio 1.3 §5.2.6, VIRTIO_BLK_T_GET_ID).
pub const ID_BYTES: usize = 20;

/// A disk to open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockOptions {
    /// A regular file or a block device.
    pub path: PathBuf,
    /// The guest may not write.
    pub read_only: bool,
    /// Bypass the host's page cache (O_DIRECT).
    pub direct: bool,
    /// What the guest reads as serial number, at most [`ID_BYTES`] bytes.
    pub id: String,
    /// How fast the guest may use it.
    pub limit: RateLimit,
}

/// A disk can't be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BlockError {
    /// There is nothing at the path.
    #[error("the disk {0:?} does not exist")]
    Missing(PathBuf),
    /// The path is a folder, a pipe, a terminal…
    #[error("the disk {0:?} is neither a regular file nor a block device")]
    Kind(PathBuf),
    /// Permissions, or a read-only file system.
    #[error("the disk {0:?} can't be opened for writing")]
    NotWritable(PathBuf, #[source] io::Error),
    /// Any other failure to open or examine it.
    #[error("the disk {0:?} can't be opened")]
    Open(PathBuf, #[source] io::Error),
    /// The file system under it has no direct I/O.
    #[error("the file system of the disk {0:?} has no direct I/O")]
    NoDirect(PathBuf),
    /// No bytes.
    #[error("the disk {0:?} is empty")]
    Empty(PathBuf),
    /// Not a whole number of sectors.
    #[error("the disk {path:?} is {bytes} bytes long, not a multiple of {unit}")]
    Size {
        /// Which disk.
        path: PathBuf,
        /// Its length.
        bytes: u64,
        /// What it should be a multiple of.
        unit: u64,
    },
    /// Another VM writes it, or others read what this one wants to write.
    #[error("the disk {0:?} is in use by another VM")]
    InUse(PathBuf),
    /// The serial number does not fit.
    #[error("the disk serial {0:?} is longer than {ID_BYTES} bytes")]
    Id(String),
}

impl BlockError {
    /// What the user could do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            BlockError::NotWritable(..) => {
                Some("open it read-only, or make the file writable".to_owned())
            }
            BlockError::NoDirect(_) => Some("use the disk without direct I/O".to_owned()),
            BlockError::Empty(path) => Some(format!(
                "give it a size first, for example: truncate -s 1G {}",
                path.display()
            )),
            BlockError::Size { path, unit, .. } => Some(format!(
                "pad it with zeros: truncate -s %{} {}",
                (*unit).max(SECTOR),
                path.display()
            )),
            BlockError::InUse(_) => {
                Some("stop that VM, or use the disk read-only in both".to_owned())
            }
            _ => None,
        }
    }
}
