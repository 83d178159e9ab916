//! What the engine sleeps on.
//!
//! Connections and doorbells are watched edge-triggered, once, and never
//! touched again: a connection remembers that its socket is readable until a
//! read finds it empty, and a doorbell needs no read at all. The listener is
//! level-triggered, since it is not always answered.

use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

/// Tokens are `host port << 32 | guest port` for connections; no connection
/// has host port `u32::MAX`, whose tokens are these and those of [`numbered`].
const RESERVED: u64 = (u32::MAX as u64) << 32;
/// Ends the worker.
pub const STOP: u64 = RESERVED;
/// Host programs wait to be accepted.
pub const LISTENER: u64 = RESERVED | 1;
/// A queue's doorbell.
pub const DOORBELL: u64 = RESERVED | 2;
/// First of the numbers for sockets without a connection.
const FIRST_NUMBER: u32 = 16;

/// The token of a socket that has no ports (yet, or any more). Numbers come
/// round after four thousand million sockets.
pub fn numbered(counter: &mut u32) -> u64 {
    *counter = counter.wrapping_add(1).max(FIRST_NUMBER);
    RESERVED | u64::from(*counter)
}

/// A connection's socket: everything, edge-triggered.
pub fn any_edge() -> EventSet {
    EventSet::IN | EventSet::OUT | EventSet::READ_HANG_UP | EventSet::EDGE_TRIGGERED
}

/// An event descriptor that need not be read.
pub fn ring_edge() -> EventSet {
    EventSet::IN | EventSet::EDGE_TRIGGERED
}

/// An epoll instance.
pub struct PollSet(Epoll);

impl PollSet {
    /// An empty set.
    pub fn new() -> io::Result<PollSet> {
        Epoll::new().map(PollSet)
    }

    /// Watches `source`. Closing it ends that.
    pub fn add(&self, source: &impl AsRawFd, token: u64, events: EventSet) -> io::Result<()> {
        self.control(ControlOperation::Add, source, token, events)
    }

    /// Changes token and events, and reports what is ready already.
    pub fn modify(&self, source: &impl AsRawFd, token: u64, events: EventSet) -> io::Result<()> {
        self.control(ControlOperation::Modify, source, token, events)
    }

    /// Stops watching.
    pub fn remove(&self, source: &impl AsRawFd) -> io::Result<()> {
        self.control(ControlOperation::Delete, source, 0, EventSet::empty())
    }

    fn control(
        &self,
        operation: ControlOperation,
        source: &impl AsRawFd,
        token: u64,
        events: EventSet,
    ) -> io::Result<()> {
        self.0.ctl(
            operation,
            source.as_raw_fd(),
            EpollEvent::new(events, token),
        )
    }

    /// Sleeps until something happens or `timeout` is over (`None`: for ever);
    /// an interrupted sleep reports nothing.
    pub fn wait(&self, timeout: Option<Duration>, events: &mut [EpollEvent]) -> io::Result<usize> {
        // Rounded up, or a deadline in half a millisecond would spin.
        let timeout = timeout.map_or(-1, |t| {
            i32::try_from(t.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX)
        });
        match self.0.wait(timeout, events) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(0),
            other => other,
        }
    }
}
