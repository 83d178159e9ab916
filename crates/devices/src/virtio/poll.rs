//! Waiting for events, for devices' threads.

use jiffy_sys::{activity, epoll};
use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

/// Most events that are reported at once.
const EVENTS_MAX: usize = 64;
const NO_EVENT: libc::epoll_event = libc::epoll_event { events: 0, u64: 0 };

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

/// An epoll instance.
#[derive(Debug)]
pub(crate) struct PollSet(Epoll);

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
        let mut found = [NO_EVENT; EVENTS_MAX];
        let room = events.len().min(EVENTS_MAX);
        let wait = || epoll::wait(&self.0, &mut found[..room], timeout);
        let count = match activity::wait("serves", wait) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
            other => other?,
        };
        for (event, found) in events.iter_mut().zip(&found[..count]) {
            *event = EpollEvent::new(EventSet::from_bits_truncate(found.events), found.u64);
        }
        Ok(count)
    }
}
