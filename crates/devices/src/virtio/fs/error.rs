//! Why there is no device.

use super::config::TagError;
use std::io;
use thiserror::Error;

/// A file system device can't be created.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FsError {
    /// The tag can't be shown to a driver.
    #[error(transparent)]
    Tag(#[from] TagError),
    /// The socket can't be used, or the worker's descriptors can't be created.
    #[error("cannot use the socket to the server of a shared folder")]
    Socket(#[source] io::Error),
}
