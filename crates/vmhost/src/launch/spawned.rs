//! The node's side of a spawned VMM.

use crate::process::{Events, VmmProcess};
use tokio::net::{UnixListener, UnixStream};

/// A VMM that was just spawned.
#[derive(Debug)]
pub struct Spawned {
    /// Its process.
    pub process: VmmProcess,
    /// Its events.
    pub events: Events,
    /// Where the guest's init will connect.
    pub listener: UnixListener,
    /// The connection that it uses first, if its VMM was handed one.
    pub first: Option<UnixStream>,
    /// Before and after the spawn, monotonic nanoseconds.
    pub spawn_ns: (u64, u64),
    /// It was a standby: its work before the request is not part of the VM's start.
    pub was_standby: bool,
    /// It was a spare.
    pub was_spare: bool,
}
