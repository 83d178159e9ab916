//! What a snapshot keeps of a disk.

use super::options::{BlockError, ID_BYTES};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use thiserror::Error;

/// A saved disk: the properties that its guest knows. The node saves its contents, the transport
/// its queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockState {
    /// Its size, bytes.
    pub bytes: u64,
    /// Whether the guest may only read.
    pub read_only: bool,
    /// Bytes of a logical block.
    pub block_size: u32,
    /// Serial number, padded with zeros.
    pub id: [u8; ID_BYTES],
}

/// Why a saved disk can't be restored.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// It can't be opened.
    #[error(transparent)]
    Open(#[from] BlockError),
    /// A property differs from what the guest knows.
    #[error("the disk {path:?} has another {what} than when the VM was saved")]
    Changed {
        /// Which disk.
        path: PathBuf,
        /// The property that differs.
        what: &'static str,
    },
}

impl BlockState {
    /// Compares a saved state with that of the disk that was opened for it.
    pub(super) fn compare(&self, path: &Path, found: &BlockState) -> Result<(), RestoreError> {
        let what = if self.bytes != found.bytes {
            "size"
        } else if self.read_only != found.read_only {
            "writability"
        } else if self.block_size != found.block_size {
            "block size"
        } else if self.id != found.id {
            "serial number"
        } else {
            return Ok(());
        };
        Err(RestoreError::Changed {
            path: path.to_owned(),
            what,
        })
    }
}
