//! The thread that serves a pair of queues.

use super::backend::Endpoint;
use super::config::Link;
use super::control::Control;
use super::receive::Receive;
use super::transmit::{Transmit, Turn, Wanted};
use crate::GuestMemory;
use crate::virtio::device::{ActiveQueue, Interrupt};
use crate::virtio::poll::{self, PollSet};
use jiffy_sys::clock;
use jiffy_sys::epoll::Event;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::eventfd::EventFd;

/// How long the driver may wait for an interrupt for a few small frames that were sent. Usually
/// frames come before that, and one interrupt is for both.
const SENT_WAIT_NS: u64 = 100_000;

const WAKEUP: u64 = 0;
const ENDPOINT: u64 = 1;
const RECEIVE: u64 = 2;
const TRANSMIT: u64 = 3;
const CONTROL: u64 = 4;

/// The state of a pair of queues that outlives an activation.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) endpoint: Endpoint,
    /// A frame that waits for buffers of the guest.
    pub(super) pending: Option<Vec<u8>>,
    poll: PollSet,
    /// Whether to report that the endpoint can be written. It nearly always can be, and each frame
    /// that comes in would report it.
    polls_output: bool,
    /// Signalled when the worker must stop, or has new limits.
    wakeup: EventFd,
}

impl Pair {
    pub(super) fn new(endpoint: Endpoint) -> io::Result<Pair> {
        use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK};
        let pair = Pair {
            endpoint,
            pending: None,
            poll: PollSet::new()?,
            polls_output: false,
            wakeup: EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?,
        };
        pair.poll.add(&pair.wakeup, WAKEUP, poll::ring_edge())?;
        if let Some(file) = pair.endpoint.descriptor() {
            pair.poll.add(&*file, ENDPOINT, poll::input_edge())?;
        }
        Ok(pair)
    }

    /// Reports once when the endpoint can be written, if `wanted`.
    fn poll_output(&mut self, wanted: bool) -> io::Result<()> {
        if self.polls_output == wanted {
            return Ok(());
        }
        self.polls_output = wanted;
        let events = match wanted {
            true => poll::any_edge(),
            false => poll::input_edge(),
        };
        match self.endpoint.descriptor() {
            Some(file) => self.poll.modify(&*file, ENDPOINT, events),
            None => Ok(()),
        }
    }

    pub(super) fn wakeup(&self) -> io::Result<EventFd> {
        self.wakeup.try_clone()
    }
}

/// Everything the thread owns.
pub(super) struct Worker {
    pub(super) pair: Pair,
    pub(super) receive: Receive,
    pub(super) transmit: Transmit,
    /// Only the first pair has a control queue.
    pub(super) control: Option<Control>,
    pub(super) features: u64,
    pub(super) memory: Arc<GuestMemory>,
    pub(super) interrupt: Arc<dyn Interrupt>,
    pub(super) link: Arc<Link>,
    pub(super) stop: Arc<AtomicBool>,
    /// When to send an interrupt that is not urgent.
    pub(super) held_interrupt: Task,
}

/// Which work may be possible.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Ready {
    receive: Task,
    transmit: Task,
    control: bool,
}

/// The state of one direction, or of an interrupt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Task {
    Now,
    /// Wait for an event.
    Idle,
    /// Work at this time of CLOCK_MONOTONIC, and not before.
    At(u64),
    /// Work at this time, or when an event comes.
    Until(u64),
}

impl Task {
    fn after(turn: Turn) -> Task {
        let after = |wait_ns| clock::monotonic_ns().saturating_add(wait_ns);
        match turn {
            Turn::More => Task::Now,
            Turn::Done | Turn::Blocked => Task::Idle,
            Turn::Later(wait_ns) => Task::At(after(wait_ns)),
            Turn::Within(wait_ns) => Task::Until(after(wait_ns)),
        }
    }

    /// An event came. Work that waits for its time keeps waiting.
    fn wake(&mut self) {
        if matches!(self, Task::Idle | Task::Until(_)) {
            *self = Task::Now;
        }
    }

    /// How long to wait; `None` to wait for an event.
    fn timeout(self) -> Option<Duration> {
        match self {
            Task::Now => Some(Duration::ZERO),
            Task::Idle => None,
            Task::At(time) | Task::Until(time) => {
                let left = time.saturating_sub(clock::monotonic_ns());
                Some(Duration::from_nanos(left))
            }
        }
    }

    fn is_due(self) -> bool {
        self.timeout() == Some(Duration::ZERO)
    }
}

impl Worker {
    /// Serves the queues until it is stopped; returns them with their positions.
    pub(super) fn run(mut self) -> (Pair, Vec<ActiveQueue>) {
        if let Err(error) = self.serve() {
            tracing::error!(%error, "the worker of a network device can't continue");
            self.interrupt.needs_reset();
        }
        for doorbell in self.doorbells() {
            let _ = self.pair.poll.remove(doorbell);
        }
        let (receive, pending) = self.receive.finish();
        self.pair.pending = pending;
        let control = self.control.map(Control::into_ring);
        let rings = [Some(receive), Some(self.transmit.into_ring()), control];
        let queues = rings.into_iter().flatten();
        (self.pair, queues.map(|ring| ring.into_active()).collect())
    }

    fn doorbells(&self) -> Vec<&EventFd> {
        let rings = [Some(self.receive.ring()), Some(self.transmit.ring())];
        let control = self.control.as_ref().map(Control::ring);
        let rings = rings.into_iter().chain([control]).flatten();
        rings.map(|ring| &ring.active().doorbell).collect()
    }

    fn serve(&mut self) -> io::Result<()> {
        for (token, doorbell) in (RECEIVE..).zip(self.doorbells()) {
            self.pair.poll.add(doorbell, token, poll::ring_edge())?;
        }
        let used_pairs = self.link.used_pairs.load(Ordering::SeqCst);
        self.pair.endpoint.configure(self.features, used_pairs)?;
        // Frames may have come before the worker ran.
        let mut ready = Ready {
            receive: Task::Now,
            transmit: Task::Now,
            control: true,
        };
        while !self.stop.load(Ordering::SeqCst) {
            let memory = self.memory.clone();
            if std::mem::take(&mut ready.control)
                && let Some(control) = &mut self.control
            {
                control.serve(&memory, &self.pair.endpoint);
            }
            if ready.transmit.is_due() {
                let turn = self.transmit.serve(&memory, &mut self.pair.endpoint);
                let waits = turn == Turn::Blocked || self.pair.endpoint.has_unsent();
                self.pair.poll_output(waits)?;
                ready.transmit = Task::after(turn);
                // What was sent is often answered at once.
                ready.receive.wake();
            }
            if ready.receive.is_due() {
                let turn = self.receive.serve(&memory, &mut self.pair.endpoint);
                ready.receive = Task::after(turn);
            }
            self.interrupt(&memory);
            if !self.pair.endpoint.is_connected() {
                self.link.set_down(&*self.interrupt);
            }
            self.wait(&mut ready)?;
        }
        if self.held_interrupt != Task::Idle {
            self.interrupt.used_buffers();
        }
        Ok(())
    }

    /// Sends an interrupt if the driver wants one: one for both queues. One for a few small frames
    /// that were sent is held.
    fn interrupt(&mut self, memory: &GuestMemory) {
        let received = self.receive.wants_interrupt(memory);
        let sent = self.transmit.wanted_interrupt(memory);
        if received || sent == Wanted::Now || self.held_interrupt.is_due() {
            self.held_interrupt = Task::Idle;
            self.transmit.interrupted();
            self.interrupt.used_buffers();
        } else if sent == Wanted::Soon && self.held_interrupt == Task::Idle {
            self.held_interrupt = Task::after(Turn::Within(SENT_WAIT_NS));
        }
    }

    /// Waits, unless there is work.
    fn wait(&mut self, ready: &mut Ready) -> io::Result<()> {
        let tasks = [ready.receive, ready.transmit, self.held_interrupt].into_iter();
        let soonest = tasks.filter_map(Task::timeout).min();
        let mut events = [Event::default(); 8];
        let count = self.pair.poll.wait(soonest, &mut events)?;
        for event in &events[..count] {
            match event.data() {
                ENDPOINT => {
                    let events = poll::event_set(event);
                    self.pair.endpoint.flush();
                    if events.contains(EventSet::OUT) {
                        ready.transmit.wake();
                    }
                    if !(events - EventSet::OUT).is_empty() {
                        ready.receive.wake();
                    }
                }
                RECEIVE => ready.receive.wake(),
                TRANSMIT => ready.transmit.wake(),
                CONTROL => ready.control = true,
                // The worker must stop, or has new limits, which also apply to waiting frames.
                WAKEUP => (ready.receive, ready.transmit) = (Task::Now, Task::Now),
                _ => {}
            }
        }
        Ok(())
    }
}
