//! What a snapshot keeps of a file system device.

use super::error::FsError;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// A saved file system device. It has no requests in flight. What the guest knows of files is in
/// the server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FsState {
    /// The tag that the driver read.
    pub tag: String,
}

/// Why a saved file system device can't be restored.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// The device can't be created.
    #[error(transparent)]
    Fs(#[from] FsError),
    /// The guest has mounted another tag.
    #[error("the saved shared folder has the tag '{saved}', the one to restore has '{actual}'")]
    Tag {
        /// The tag in the state.
        saved: String,
        /// The tag of the device.
        actual: String,
    },
}

impl FsState {
    /// Checks that a device with the tag `actual` could have saved this state.
    pub(super) fn check(&self, actual: &str) -> Result<(), RestoreError> {
        match self.tag == actual {
            true => Ok(()),
            false => Err(RestoreError::Tag {
                saved: self.tag.clone(),
                actual: actual.to_owned(),
            }),
        }
    }
}
