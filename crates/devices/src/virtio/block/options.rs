//! The options of a disk, and why it can't be used.

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
    /// Path of a regular file or a block device.
    pub path: PathBuf,
    /// Whether the guest may only read.
    pub read_only: bool,
    /// Whether to bypass the host's page cache (O_DIRECT).
    pub direct: bool,
    /// The serial number for the guest, at most [`ID_BYTES`] bytes.
    pub id: String,
    /// Limits of the guest's use.
    pub limit: RateLimit,
}

/// Why a disk can't be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BlockError {
    /// There is nothing at the path.
    #[error("the disk {0:?} does not exist")]
    Missing(PathBuf),
    /// The path is a folder, a pipe, a terminal or the like.
    #[error("the disk {0:?} is neither a regular file nor a block device")]
    Kind(PathBuf),
    /// Permissions or a read-only file system prevent writing.
    #[error("the disk {0:?} can't be opened for writing")]
    NotWritable(PathBuf, #[source] io::Error),
    /// It can't be opened or examined for another reason.
    #[error("the disk {0:?} can't be opened")]
    Open(PathBuf, #[source] io::Error),
    /// Its file system does not support direct I/O.
    #[error("the file system of the disk {0:?} does not support direct I/O")]
    NoDirect(PathBuf),
    /// It has no bytes.
    #[error("the disk {0:?} is empty")]
    Empty(PathBuf),
    /// Its length is not a whole number of sectors.
    #[error("the disk {path:?} is {bytes} bytes long, not a multiple of {unit}")]
    Size {
        /// Which disk.
        path: PathBuf,
        /// Its length, bytes.
        bytes: u64,
        /// The length must be a multiple of this, bytes.
        unit: u64,
    },
    /// Another VM writes it, or others read what this one is to write.
    #[error("the disk {0:?} is in use by another VM")]
    InUse(PathBuf),
    /// The serial number is too long.
    #[error("the disk serial {0:?} is longer than {ID_BYTES} bytes")]
    Id(String),
}

impl BlockError {
    /// What the user can do about it.
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
