//! Waiting for events, for devices' threads.

use jiffy_sys::activity;
use jiffy_sys::epoll::{self, Event};
use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

/// All events of a socket, edge-triggered.
pub(crate) fn any_edge() -> EventSet {
    EventSet::IN | EventSet::OUT | EventSet::READ_HANG_UP | EventSet::EDGE_TRIGGERED
}

/// All events of a socket except that it can be written, edge-triggered.
pub(crate) fn input_edge() -> EventSet {
    any_edge() - EventSet::OUT
}

/// An event descriptor that need not be read.
pub(crate) fn ring_edge() -> EventSet {
    EventSet::IN | EventSet::EDGE_TRIGGERED
}

/// The events that were reported.
pub(crate) fn event_set(event: &Event) -> EventSet {
    EventSet::from_bits_truncate(event.events())
}

/// An epoll instance.
#[derive(Debug)]
pub(crate) struct PollSet(Epoll);

impl PollSet {
    /// An empty set.
    ///
    /// # Errors
    ///
    /// If epoll_create1(2) fails.
    pub fn new() -> io::Result<PollSet> {
        Epoll::new().map(PollSet)
    }

    /// Watches `source` until it is closed.
    ///
    /// # Errors
    ///
    /// If epoll_ctl(2) fails: `EEXIST` if `source` is watched already.
    pub fn add(&self, source: &impl AsRawFd, token: u64, events: EventSet) -> io::Result<()> {
        self.control(ControlOperation::Add, source, token, events)
    }

    /// Changes token and events; reports what is ready already.
    ///
    /// # Errors
    ///
    /// If epoll_ctl(2) fails: `ENOENT` if `source` is not watched.
    pub fn modify(&self, source: &impl AsRawFd, token: u64, events: EventSet) -> io::Result<()> {
        self.control(ControlOperation::Modify, source, token, events)
    }

    /// Stops watching.
    ///
    /// # Errors
    ///
    /// If epoll_ctl(2) fails: `ENOENT` if `source` is not watched.
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

    /// Sleeps until an event comes or `timeout` is over (`None`: forever). Returns the number of
    /// events. An interrupted sleep reports none.
    ///
    /// # Errors
    ///
    /// If epoll_wait(2) fails.
    pub fn wait(&self, timeout: Option<Duration>, events: &mut [Event]) -> io::Result<usize> {
        match activity::wait("serves", || epoll::wait(&self.0, events, timeout)) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(0),
            other => other,
        }
    }
}
