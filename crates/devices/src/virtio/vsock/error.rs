//! What can be wrong with a socket device.

use std::io;
use std::path::PathBuf;
use thiserror::Error;

/// A socket device could not be made.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum VsockError {
    /// A reserved or too large context id.
    #[error("vsock context id {0} is not a guest's: those are 3 to 4294967294")]
    Cid(u64),
    /// `sun_path` has 108 bytes.
    #[error("the socket path {path:?} is longer than the 107 bytes a Unix socket can have")]
    PathTooLong {
        /// The path.
        path: PathBuf,
    },
    /// Somebody answers there.
    #[error("another program listens on {path:?}")]
    InUse {
        /// The path.
        path: PathBuf,
    },
    /// Not ours to replace.
    #[error("{path:?} exists and is not a socket")]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// The socket could not be made.
    #[error("cannot listen on {path:?}")]
    Listen {
        /// The path.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// No poll set.
    #[error("cannot make the vsock device's poll set")]
    Poll(#[source] io::Error),
    /// A damaged or hostile snapshot.
    #[error("the saved vsock device has {0} connections, more than a device can have")]
    SavedConnections(usize),
}

/// 0, 1 and 2 are the hypervisor, the local machine and the host; the largest
/// 32-bit number means any (Virtio 1.3 §5.10.4).
pub(super) fn check_cid(cid: u64) -> Result<(), VsockError> {
    match cid {
        3..0xffff_ffff => Ok(()),
        _ => Err(VsockError::Cid(cid)),
    }
}
