//! A VMM that was spawned, with what its VM needs of it.

use crate::process::{Events, VmmProcess};
use tokio::net::UnixListener;

/// A VMM that was just spawned.
#[derive(Debug)]
pub struct Spawned {
    /// Its process.
    pub process: VmmProcess,
    /// Its events.
    pub events: Events,
    /// Where the guest's init will connect.
    pub listener: UnixListener,
    /// Before and after the spawn, monotonic nanoseconds.
    pub spawn_ns: (u64, u64),
    /// It was restored ahead: what it did before this is no part of its start.
    pub was_standby: bool,
    /// Its process was there before.
    pub was_spare: bool,
}
