//! What a snapshot keeps.

use super::options::{BlockError, ID_BYTES};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use thiserror::Error;

/// A saved disk: what its guest knows of it. Its contents are saved by the node; its queue
/// by the transport.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockState {
    /// Size.
    pub bytes: u64,
    /// The guest can't write.
    pub read_only: bool,
    /// Bytes of a logical block.
    pub block_size: u32,
    /// Serial number, padded with zeros.
    pub id: [u8; ID_BYTES],
}

/// A saved disk can't be restored.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// It can't be opened.
    #[error(transparent)]
    Open(#[from] BlockError),
    /// It is not what the guest was told.
    #[error("the disk {path:?} has another {what} than when the VM was saved")]
    Changed {
        /// Which disk.
        path: PathBuf,
        /// What differs.
        what: &'static str,
    },
}

impl BlockState {
    /// Compares a saved state with that of the disk opened for it.
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
