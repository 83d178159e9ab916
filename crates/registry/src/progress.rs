//! Progress and cancellation of transfers.

use crate::Descriptor;
use std::time::{Duration, Instant};

/// Receives progress from the transferring threads. `()` ignores it.
pub trait Progress: Sync {
    /// `done` bytes of this blob are present here or, in a push, in the registry. May go back when
    /// a transfer starts again. At the end `done` is the blob's size.
    fn moved(&self, _blob: &Descriptor, _done: u64) {}

    /// A temporary failure; the request is retried after `wait`.
    fn retrying(&self, _why: &str, _wait: Duration) {}

    /// Whether to cancel: called between pieces of at most 64 KiB and while waiting. A cancelled
    /// operation fails with [`RegistryError::Cancelled`](crate::RegistryError::Cancelled).
    fn cancelled(&self) -> bool {
        false
    }

    /// The time at which everything must be complete; `None` for no limit beyond those of the
    /// options. After it, the operation fails like a broken connection, and is not retried.
    fn deadline(&self) -> Option<Instant> {
        None
    }
}

impl Progress for () {}
