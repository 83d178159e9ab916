//! The events that the engine waits for.
//!
//! Connections and doorbells are watched edge-triggered, and their registration never changes: a
//! connection remembers that its socket is readable until a read finds it empty, and a doorbell
//! needs no read. The listener is level-triggered, because it is not always accepted from.

use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

/// Tokens of connections are `host port << 32 | guest port`. No connection has host port
/// `u32::MAX`, to which these tokens and those of [`numbered`] belong.
const RESERVED: u64 = (u32::MAX as u64) << 32;
/// The worker must stop.
pub const STOP: u64 = RESERVED;
/// Host programs wait to be accepted.
pub const LISTENER: u64 = RESERVED | 1;
/// A queue's doorbell.
pub const DOORBELL: u64 = RESERVED | 2;
/// First number of sockets without a connection.
const FIRST_NUMBER: u32 = 16;

/// The token of a socket that has no ports (yet, or any more). Numbers repeat after four thousand
/// million sockets.
pub fn numbered(counter: &mut u32) -> u64 {
    *counter = counter.wrapping_add(1).max(FIRST_NUMBER);
    RESERVED | u64::from(*counter)
}

/// All events of a connection's socket, edge-triggered.
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

    /// Watches `source` until it is closed.
    pub fn add(&self, source: &impl AsRawFd, token: u64, events: EventSet) -> io::Result<()> {
        self.control(ControlOperation::Add, source, token, events)
    }

    /// Changes token and events; reports what is ready already.
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

    /// Sleeps until an event comes or `timeout` is over (`None`: forever). An interrupted sleep
    /// reports no events.
    pub fn wait(&self, timeout: Option<Duration>, events: &mut [EpollEvent]) -> io::Result<usize> {
        // Rounded up, because a deadline in half a millisecond would otherwise be polled in a loop.
        let timeout = timeout.map_or(-1, |t| {
            i32::try_from(t.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX)
        });
        match self.0.wait(timeout, events) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(0),
            other => other,
        }
    }
}
