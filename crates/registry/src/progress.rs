//! How far something is, and whether it shall go on.

use crate::Descriptor;
use std::time::Duration;

/// Told of what moves, from the threads that move it. `()` is one that does not care.
pub trait Progress: Sync {
    /// Of this blob, `done` bytes are here, or, in a push, there. May go back when a
    /// transfer starts over. At the end `done` is the blob's size.
    fn moved(&self, _blob: &Descriptor, _done: u64) {}

    /// Something failed that may pass, and is tried again after `wait`.
    fn retrying(&self, _why: &str, _wait: Duration) {}

    /// Whether to give up: asked between pieces of at most 64 KiB and while waiting. What
    /// is given up ends with [`RegistryError::Cancelled`](crate::RegistryError::Cancelled).
    fn cancelled(&self) -> bool {
        false
    }
}

impl Progress for () {}
