//! How far something is, and whether it shall go on.

use crate::Descriptor;
use std::time::{Duration, Instant};

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

    /// When all of it must be over, however the bytes come: `None` if they may come as
    /// slowly as the options let them. What takes longer fails as a connection does that
    /// broke, and is not tried again.
    fn deadline(&self) -> Option<Instant> {
        None
    }
}

impl Progress for () {}
