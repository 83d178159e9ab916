//! Errors of socket devices.

use std::io;
use std::path::PathBuf;
use thiserror::Error;

/// Why a socket device could not be created.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum VsockError {
    /// The context id is reserved or too large.
    #[error("{0} is not a valid vsock context id of a guest; use 3 to 4294967294")]
    Cid(u64),
    /// The path is too long: `sun_path` has 108 bytes.
    #[error("the socket path {path:?} is longer than the 107 bytes a Unix socket can have")]
    PathTooLong {
        /// The path.
        path: PathBuf,
    },
    /// Another program listens on the socket.
    #[error("another program listens on {path:?}")]
    InUse {
        /// The path.
        path: PathBuf,
    },
    /// The file at the path is not a socket, so it is not replaced.
    #[error("{path:?} exists and is not a socket")]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// The socket could not be created.
    #[error("cannot listen on {path:?}")]
    Listen {
        /// The path.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A poll set could not be created.
    #[error("cannot create the vsock device's poll set")]
    Poll(#[source] io::Error),
    /// The snapshot is damaged or hostile.
    #[error("the saved vsock device has {0} connections, more than a device can have")]
    SavedConnections(usize),
}

/// Checks a guest's context id: 0, 1 and 2 are the hypervisor, the local machine and the host; the
/// largest 32-bit number means any (Virtio 1.3 §5.10.4).
pub(super) fn check_cid(cid: u64) -> Result<(), VsockError> {
    match cid {
        3..0xffff_ffff => Ok(()),
        _ => Err(VsockError::Cid(cid)),
    }
}
