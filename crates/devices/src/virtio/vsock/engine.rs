//! The device's work, in turns.

use super::muxer::Muxer;
use super::packet::{self, Buffers, HEADER_LEN};
use super::rings::Rings;
use super::tokens;
use crate::virtio::device::ActiveQueue;
use crate::virtio::poll::{self, PollSet};
use crate::virtio::queue::ring::Ring;
use jiffy_sys::epoll::Event;
use jiffy_sys::mutex::lock;
use std::io;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use virtio_queue::QueueT;
use vm_memory::Permissions;

/// Packets of one direction before the other one is served.
const BATCH: usize = 64;

/// Turns after the worker was stopped: more than full rings need, and a limit for a guest that
/// keeps sending.
const LAST_TURNS: usize = 8;

/// `VIRTIO_VSOCK_EVENT_TRANSPORT_RESET` (Virtio 1.3 §5.10.6.7).
const EVENT_TRANSPORT_RESET: u32 = 0;

/// How long programs wait for the driver to handle a reset.
pub(super) const RESET_TIME: Duration = Duration::from_millis(500);

/// The state of a transport reset. Linux processes events and packets concurrently, and would drop
/// a connection made too early together with those from before the reset; so programs wait until it
/// returns the event buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TransportReset {
    None,
    Owed,
    /// The event was sent when the driver had added this many event buffers.
    Sent(u16),
}

/// Connections and rings together.
pub struct Engine {
    muxer: Muxer,
    rings: Option<Rings>,
    reset: TransportReset,
    /// Programs wait for the reset until then.
    gate: Option<Instant>,
    /// Queue positions, and the time when the rings were taken away.
    detached_at: Option<(Vec<Position>, Instant)>,
}

/// Distinguishes a queue that was kept from one that was set up again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Position {
    descriptors: u64,
    next_avail: u16,
    next_used: u16,
}

impl Engine {
    /// An engine without rings. With `lost_connections`, the guest must be told that all its
    /// connections are gone.
    pub fn new(muxer: Muxer, lost_connections: bool) -> Engine {
        Engine {
            muxer,
            rings: None,
            reset: match lost_connections {
                true => TransportReset::Owed,
                false => TransportReset::None,
            },
            gate: None,
            detached_at: None,
        }
    }

    /// The connections.
    pub fn muxer(&self) -> &Muxer {
        &self.muxer
    }

    /// The connections, mutable.
    pub fn muxer_mut(&mut self) -> &mut Muxer {
        &mut self.muxer
    }

    /// Takes queues into use. Connections stay open if these are the queues that [`Engine::detach`]
    /// returned; otherwise the driver was reset and knows none.
    ///
    /// # Errors
    ///
    /// If epoll_ctl(2) of a doorbell fails.
    pub fn attach(&mut self, rings: Rings, poll: &PollSet) -> io::Result<()> {
        for (number, ring) in (0..).zip(rings.each()) {
            let doorbell = &ring.active().doorbell;
            poll.add(doorbell, tokens::DOORBELL + number, poll::ring_edge())?;
        }
        if let Some((positions, since)) = self.detached_at.take() {
            self.muxer.shift_deadlines(since.elapsed());
            if positions != Engine::positions(&rings) {
                self.muxer.forget_guest();
                self.reset = TransportReset::None;
            }
        }
        if self.reset != TransportReset::None {
            self.gate = Some(Instant::now() + RESET_TIME);
        }
        self.rings = Some(rings);
        Ok(())
    }

    /// Tells a restored guest, before its vCPUs run, that its connections are gone: with the event,
    /// and with a RST for each as far as it has buffers. The guest then only waits for its
    /// interrupt, not for a thread of the host.
    pub fn announce_reset(&mut self) {
        let Some(rings) = &mut self.rings else {
            return;
        };
        if self.reset == TransportReset::Owed {
            tell_reset(&mut self.reset, rings);
            make_packets(&mut self.muxer, rings);
            rings.notify();
        }
    }

    /// Returns the queues; every chain that was taken was returned.
    pub fn detach(&mut self, poll: &PollSet) -> Vec<ActiveQueue> {
        let Some(rings) = self.rings.take() else {
            return Vec::new();
        };
        self.detached_at = Some((Engine::positions(&rings), Instant::now()));
        for ring in rings.each() {
            // Fails if the last copy of the descriptor was closed, which removes it as well.
            let _ = poll.remove(&ring.active().doorbell);
        }
        rings.into_queues()
    }

    fn positions(rings: &Rings) -> Vec<Position> {
        let position = |ring: &Ring| {
            let queue = &ring.active().queue;
            Position {
                descriptors: queue.desc_table(),
                next_avail: queue.next_avail(),
                next_used: queue.next_used(),
            }
        };
        rings.each().map(position).collect()
    }

    /// Handles an event of the poll set.
    pub fn on_event(&mut self, event: &Event, now: Instant) {
        // Doorbells only wake the thread: every turn checks all rings.
        if !(tokens::DOORBELL..tokens::DOORBELL + 3).contains(&event.data()) {
            self.muxer
                .on_socket(event.data(), poll::event_set(event), now);
        }
    }

    /// Moves packets in both directions, within limits. Returns how long to sleep at most (`None`:
    /// until an event comes).
    pub fn turn(&mut self, now: Instant) -> Option<Duration> {
        self.muxer.expire(now);
        let Some(rings) = &mut self.rings else {
            return None;
        };
        tell_reset(&mut self.reset, rings);
        if self.reset == TransportReset::None || self.gate.is_some_and(|until| now >= until) {
            self.gate = None;
        }
        self.muxer.set_open(self.gate.is_none());
        let more_taken = take_packets(&mut self.muxer, rings, now);
        let more_made = make_packets(&mut self.muxer, rings);
        rings.notify();
        if more_taken || more_made {
            return Some(Duration::ZERO);
        }
        let next = [self.gate, self.muxer.next_deadline()]
            .into_iter()
            .flatten()
            .min();
        next.map(|at| at.saturating_duration_since(now))
    }
}

/// Sends the reset event, and notices when the driver has handled it.
fn tell_reset(reset: &mut TransportReset, rings: &mut Rings) {
    let memory = &*rings.memory;
    let Some(ring) = &mut rings.event else {
        *reset = TransportReset::None;
        return;
    };
    match *reset {
        TransportReset::None => {}
        TransportReset::Sent(added) => {
            if ring.added(memory) != added {
                *reset = TransportReset::None;
            }
        }
        TransportReset::Owed => {
            let added = ring.notify_for_next(memory);
            let Some(chain) = ring.pop(memory) else {
                return;
            };
            let head = chain.head();
            let mut buffers = Buffers::new(memory);
            let event = EVENT_TRANSPORT_RESET.to_le_bytes();
            let loaded = buffers.load(chain, Permissions::Write);
            let fits = loaded.is_ok() && buffers.len() >= event.len();
            if fits {
                buffers.copy_from(0, &event);
                ring.give_back(memory, head, event.len() as u32);
            } else {
                ring.give_back(memory, head, 0);
            }
            // A driver whose buffers are unusable can't be told.
            *reset = TransportReset::Sent(added);
        }
    }
}

/// Processes packets from the guest; true if some are left.
fn take_packets(muxer: &mut Muxer, rings: &mut Rings, now: Instant) -> bool {
    let memory = &*rings.memory;
    let ring = &mut rings.transmit;
    let mut buffers = Buffers::new(memory);
    ring.disable_notification(memory);
    for _ in 0..BATCH {
        if muxer.is_congested() {
            // The guest must take answers first: `make_packets` makes them.
            return false;
        }
        let chain = match ring.pop(memory) {
            Some(chain) => chain,
            None if ring.enable_notification(memory) => match ring.pop(memory) {
                Some(chain) => chain,
                None => return false,
            },
            None => return false,
        };
        let head = chain.head();
        let parsed = buffers
            .load(chain, Permissions::Read)
            .and_then(|()| packet::parse(&buffers, &muxer.source_cids()));
        match parsed {
            Ok(header) => muxer.receive(&header, &buffers, now),
            Err(error) => tracing::debug!(%error, "vsock: packet dropped"),
        }
        ring.give_back(memory, head, 0);
    }
    true
}

/// Makes packets for the guest while it has buffers; true if some are left.
fn make_packets(muxer: &mut Muxer, rings: &mut Rings) -> bool {
    let memory = &*rings.memory;
    let ring = &mut rings.receive;
    let was_congested = muxer.is_congested();
    let mut buffers = Buffers::new(memory);
    ring.disable_notification(memory);
    for _ in 0..BATCH {
        if !muxer.has_packet() {
            return was_congested;
        }
        let chain = match ring.pop(memory) {
            Some(chain) => chain,
            None if ring.enable_notification(memory) => match ring.pop(memory) {
                Some(chain) => chain,
                None => return false,
            },
            None => return was_congested && !muxer.is_congested(),
        };
        let head = chain.head();
        let loaded = buffers.load(chain, Permissions::Write);
        if loaded.is_err() || buffers.len() <= HEADER_LEN {
            tracing::debug!("vsock: unusable receive buffer");
            ring.give_back(memory, head, 0);
            continue;
        }
        match muxer.next_packet(&buffers) {
            Some(header) => {
                buffers.copy_from(0, &header.to_bytes());
                ring.give_back(memory, head, HEADER_LEN as u32 + header.len);
            }
            None => ring.put_back(),
        }
    }
    true
}

/// Sleeps for at most `timeout`, then does one turn.
///
/// # Errors
///
/// If epoll_wait(2) fails. There is no turn then.
pub fn step(engine: &Mutex<Engine>, poll: &PollSet, timeout: Option<Duration>) -> io::Result<Step> {
    let mut events = [Event::default(); 64];
    let count = poll.wait(timeout, &mut events)?;
    let now = Instant::now();
    let mut engine = lock(engine);
    let mut stop = false;
    for event in &events[..count] {
        match event.data() {
            tokens::STOP => stop = true,
            _ => engine.on_event(event, now),
        }
    }
    let mut sleep = engine.turn(now);
    if !stop {
        return Ok(Step::Sleep(sleep));
    }
    // Packets that the guest sent before the stop are still delivered.
    for _ in 0..LAST_TURNS {
        if sleep != Some(Duration::ZERO) {
            break;
        }
        sleep = engine.turn(now);
    }
    Ok(Step::Stop)
}

/// What to do after a turn.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    /// Sleep for at most this long (`None`: until an event comes).
    Sleep(Option<Duration>),
    /// End.
    Stop,
}

/// The worker thread: does turns until it is stopped.
pub fn run(engine: &Mutex<Engine>, poll: &PollSet) {
    // A doorbell may have been signalled before the thread ran.
    let mut timeout = Some(Duration::ZERO);
    loop {
        match step(engine, poll, timeout) {
            Ok(Step::Sleep(next)) => timeout = next,
            Ok(Step::Stop) => return,
            Err(error) => {
                tracing::error!(%error, "the vsock device stops: its poll set failed");
                return;
            }
        }
    }
}
