//! Passes frames to the guest.

use super::backend::Endpoint;
use super::config::Link;
use super::frame::Place;
use super::header;
use super::transmit::Turn;
use super::{ETHERNET, FRAME_MAX, FRAMES_PER_TURN};
use crate::GuestMemory;
use crate::virtio::queue::Cost;
use crate::virtio::queue::chain::{Table, Walk};
use crate::virtio::queue::ring::{Ring, Used, used};
use crate::virtio::queue::segment::{self, Region, Segment};
use crate::virtio::queue::vectored::Vectors;
use jiffy_sys::clock;
use std::ops::Deref;
use std::sync::Arc;
use virtio_bindings::virtio_net::*;
use virtio_queue::QueueT;
use vm_memory::VolatileMemory as _;

/// Most segments of all buffers that are held at once.
const SEGMENTS_MAX: usize = 512;
/// Returned buffers that the driver need not see before the end of a turn.
const RETURNED_MAX: usize = 64;
/// How long to wait for buffers for the longest frame while there are some. Usually the driver has
/// not yet added those that it emptied, and part of a frame would be copied three times.
const BUFFERS_WAIT_NS: u64 = 1_000_000;
/// After so many frames that fitted into one chain each, the next one probably does, too.
const SMALL_FRAMES: u32 = 16;
/// Bytes of the longest frame with its header.
pub(super) const WHOLE_MAX: usize = header::BYTES + FRAME_MAX;

/// A chain of the driver that waits to be filled.
#[derive(Debug)]
struct Held {
    head: u16,
    descriptors: u16,
    segments: u16,
    bytes: u32,
}

/// A list that is used up from its front. What is left is moved seldom: it may be hundreds of items,
/// and a small frame takes one.
struct Front<T> {
    items: Vec<T>,
    first: usize,
}

impl<T> Default for Front<T> {
    fn default() -> Front<T> {
        Front {
            items: Vec::new(),
            first: 0,
        }
    }
}

impl<T> Deref for Front<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.items[self.first..]
    }
}

impl<T> Front<T> {
    #[inline]
    fn push(&mut self, item: T) {
        self.items.push(item);
    }

    /// Keeps the first `count` items.
    fn truncate(&mut self, count: usize) {
        self.items.truncate(self.first + count);
    }

    fn drop_front(&mut self, count: usize) {
        self.first += count;
        if self.first == self.items.len() || self.first >= SEGMENTS_MAX {
            self.items.drain(..self.first);
            self.first = 0;
        }
    }
}

/// Guest memory, with what is looked up once for all chains of a turn, because a lookup takes as
/// long as the rest of a chain.
struct View<'a> {
    memory: &'a GuestMemory,
    table: Table<'a>,
    region: Region<'a>,
}

/// The receive queue of a pair.
///
/// Buffers are taken before the frame's size is known, and are held until they are filled. They are
/// put back into the queue when the device stops.
pub(super) struct Receive {
    ring: Ring,
    link: Arc<Link>,
    mergeable: bool,
    /// Bytes that a usual frame needs, with its header.
    usual: usize,
    held: Front<Held>,
    /// Memory of all chains held, in order: of one chain, unless the driver allows merging.
    segments: Front<Segment>,
    vectors: Vectors,
    room: usize,
    /// Until when to wait for more buffers, since there were enough.
    few_until: Option<u64>,
    /// How many frames in a row would have fitted into their first chain.
    small_frames: u32,
    /// Space for what does not fit into the buffers that are read into; touched only when it is
    /// needed.
    spill: Box<[u8]>,
    /// A frame, with its header, that waits for buffers.
    pending: Option<Vec<u8>>,
    /// Filled buffers that the driver does not see yet; none between turns.
    returned: Vec<Used>,
}

impl Receive {
    pub(super) fn new(
        ring: Ring,
        features: u64,
        link: Arc<Link>,
        pending: Option<Vec<u8>>,
    ) -> Receive {
        let has = |feature: u32| features & (1 << feature) != 0;
        let segments = [
            VIRTIO_NET_F_GUEST_TSO4,
            VIRTIO_NET_F_GUEST_TSO6,
            VIRTIO_NET_F_GUEST_UFO,
            VIRTIO_NET_F_GUEST_USO4,
            VIRTIO_NET_F_GUEST_USO6,
        ];
        let usual = if segments.into_iter().any(has) {
            WHOLE_MAX
        } else {
            let packet = usize::from(link.mtu.unwrap_or(1500));
            header::BYTES + ETHERNET + 4 + packet
        };
        Receive {
            ring,
            link,
            mergeable: has(VIRTIO_NET_F_MRG_RXBUF),
            usual,
            held: Front::default(),
            segments: Front::default(),
            vectors: Vectors::default(),
            room: 0,
            few_until: None,
            small_frames: 0,
            spill: vec![0; WHOLE_MAX].into_boxed_slice(),
            pending,
            returned: Vec::new(),
        }
    }

    pub(super) fn ring(&self) -> &Ring {
        &self.ring
    }

    /// Returns the queue, and the frame that waits.
    pub(super) fn finish(mut self) -> (Ring, Option<Vec<u8>>) {
        self.ring.put_back_last(self.held.len() as u16);
        (self.ring, self.pending)
    }

    /// Whether the driver wants an interrupt for the frames of the last turn.
    pub(super) fn wants_interrupt(&mut self, memory: &GuestMemory) -> bool {
        self.ring.wants_interrupt(memory)
    }

    /// Receives frames for one turn.
    pub(super) fn serve(&mut self, memory: &GuestMemory, endpoint: &mut Endpoint) -> Turn {
        let mut turn = Turn::More;
        let mut view = View {
            memory,
            table: self.ring.table(memory),
            region: Region::default(),
        };
        for _ in 0..FRAMES_PER_TURN {
            if let Err(wait_ns) = self.link.receive_limiter.try_admit_unknown() {
                turn = Turn::Later(wait_ns);
                break;
            }
            let going_on = match self.pending.take() {
                Some(frame) => self.deliver_pending(&mut view, frame),
                None if !self.has_buffers(&mut view, self.usual) => false,
                None => {
                    if let Some(wait_ns) = self.wait_for_buffers() {
                        turn = Turn::Within(wait_ns);
                        break;
                    }
                    self.receive(&mut view, endpoint)
                }
            };
            if !going_on {
                turn = Turn::Done;
                break;
            }
            if self.returned.len() >= RETURNED_MAX {
                self.publish(memory);
            }
        }
        self.publish(memory);
        turn
    }

    fn publish(&mut self, memory: &GuestMemory) {
        self.ring.give_back_together(memory, &mut self.returned);
    }

    /// Holds buffers for at least `wanted` bytes, if there are any. If there are too few, the
    /// driver notifies when it adds one.
    fn has_buffers(&mut self, view: &mut View<'_>, wanted: usize) -> bool {
        let memory = view.memory;
        loop {
            if self.room < wanted {
                self.hold(view, wanted);
            }
            let enough = match self.mergeable {
                true => self.room >= wanted,
                false => !self.held.is_empty(),
            };
            if enough {
                self.ring.disable_notification(memory);
                return true;
            }
            if !self.ring.enable_notification(memory) || self.segments.len() >= SEGMENTS_MAX {
                return !self.held.is_empty();
            }
        }
    }

    fn hold(&mut self, view: &mut View<'_>, wanted: usize) {
        let mut refused = Vec::new();
        while self.room < wanted && self.segments.len() < SEGMENTS_MAX {
            if !self.mergeable && !self.held.is_empty() {
                break;
            }
            let Some(chain) = self.ring.pop(view.memory) else {
                break;
            };
            let head = chain.head();
            match self.gather(view, head) {
                Some(held) => {
                    self.room += held.bytes as usize;
                    self.held.push(held);
                }
                None => refused.push(used(head, 0)),
            }
        }
        // Refused chains are not held, so that they are not put back with those that are.
        self.ring.give_back_together(view.memory, &mut refused);
    }

    /// Appends the segments of a chain; returns `None`, and appends nothing, if it violates a rule.
    #[inline]
    fn gather(&mut self, view: &mut View<'_>, head: u16) -> Option<Held> {
        // As nearly all chains are. The steps below take three times as long.
        if let Some(only) = view.table.single(head)
            && let bytes = only.length as usize
            && (header::BYTES..=WHOLE_MAX).contains(&bytes)
        {
            let segment = Segment {
                address: only.address,
                length: bytes,
            };
            let fits = only.is_writable() && view.region.contains(view.memory, &segment);
            fits.then(|| self.segments.push(segment))?;
            return Some(Held {
                head,
                descriptors: 1,
                segments: 1,
                bytes: only.length,
            });
        }
        let before = self.segments.len();
        let (mut descriptors, mut bytes, mut whole) = (0u16, 0usize, false);
        let mut chain: Walk<'_> = view.table.walk(head);
        while !whole && let Some(descriptor) = chain.next() {
            let segment = Segment {
                address: descriptor.address,
                // No frame needs more, and the limit keeps sums small.
                length: (descriptor.length as usize).min(WHOLE_MAX),
            };
            if segment.length > 0 {
                self.segments.push(segment);
            }
            let fits = descriptor.is_writable()
                && (segment.length == 0 || view.region.contains(view.memory, &segment))
                && self.segments.len() - before <= SEGMENTS_MAX;
            if !fits {
                break;
            }
            descriptors = descriptors.saturating_add(1);
            bytes = bytes.saturating_add(segment.length);
            whole = !descriptor.has_next();
        }
        if !whole || bytes < header::BYTES {
            self.segments.truncate(before);
            return None;
        }
        Some(Held {
            head,
            descriptors,
            // At most SEGMENTS_MAX, of at most WHOLE_MAX bytes each.
            segments: (self.segments.len() - before) as u16,
            bytes: bytes as u32,
        })
    }

    /// Receives one frame from the backend; false if there was none.
    fn receive(&mut self, view: &mut View<'_>, endpoint: &mut Endpoint) -> bool {
        let memory = view.memory;
        // Each segment costs the kernel as much as a small part of a frame.
        let first = self.held.first().expect("the caller has buffers");
        let (first_room, first_segments) = (first.bytes as usize, usize::from(first.segments));
        let (room, segments) = match self.small_frames {
            SMALL_FRAMES.. => (first_room, first_segments),
            _ => (self.room, self.segments.len()),
        };
        let received = endpoint.receive(Place {
            memory,
            region: &mut view.region,
            segments: &self.segments[..segments],
            spill: &mut self.spill,
            vectors: &mut self.vectors,
        });
        let whole = match received {
            Some(whole) => whole.min(room + self.spill.len()),
            None => return false,
        };
        self.small_frames = match whole <= first_room {
            true => self.small_frames.saturating_add(1),
            false => 0,
        };
        let spilled = &self.spill[..whole.saturating_sub(room)];
        if whole < header::BYTES + ETHERNET {
            self.link.counters.received.dropped();
        } else if whole <= self.room {
            if !spilled.is_empty() {
                segment::write(memory, &self.segments, room, spilled);
            }
            self.deliver(view, whole);
        } else {
            // Part of it is in the guest's buffers already, which the device still holds.
            let mut frame = vec![0; room];
            segment::read(memory, &self.segments, 0, &mut frame);
            frame.extend_from_slice(spilled);
            self.pending = Some(frame);
        }
        true
    }

    /// Delivers a waiting frame if there is space now, or drops it if there can never be; returns
    /// false if it still waits.
    fn deliver_pending(&mut self, view: &mut View<'_>, frame: Vec<u8>) -> bool {
        let memory = view.memory;
        let any = self.has_buffers(view, frame.len().max(self.usual));
        if any && frame.len() <= self.room {
            segment::write(memory, &self.segments, 0, &frame);
            self.deliver(view, frame.len());
            return true;
        }
        if any && self.holds_most() {
            self.link.counters.received.dropped();
            return true;
        }
        self.pending = Some(frame);
        false
    }

    /// How many nanoseconds to wait for more buffers before a frame is received into those held.
    fn wait_for_buffers(&mut self) -> Option<u64> {
        if self.room >= self.usual {
            self.few_until = None;
            return None;
        }
        if self.holds_most() {
            return None;
        }
        let now = clock::monotonic_ns();
        let until = *self.few_until.get_or_insert(now + BUFFERS_WAIT_NS);
        until.checked_sub(now).filter(|wait_ns| *wait_ns > 0)
    }

    /// Whether no more buffers can be held.
    fn holds_most(&self) -> bool {
        let descriptors: usize = self
            .held
            .iter()
            .map(|held| usize::from(held.descriptors))
            .sum();
        !self.mergeable
            || descriptors >= usize::from(self.ring.active().queue.size())
            || self.segments.len() >= SEGMENTS_MAX
    }

    /// Returns the buffers that the first `whole` bytes fill.
    fn deliver(&mut self, view: &View<'_>, whole: usize) {
        let (mut left, mut buffers, mut segments) = (whole, 0, 0);
        for held in self.held.iter() {
            let bytes = held.bytes as usize;
            let filled = left.min(bytes);
            self.returned.push(used(held.head, filled as u32));
            buffers += 1;
            segments += usize::from(held.segments);
            self.room -= bytes;
            left -= filled;
            if left == 0 {
                break;
            }
        }
        let count = (buffers as u16).to_le_bytes();
        let (place, bytes) = (header::NUM_BUFFERS, count.len());
        let first = view.region.bytes(&self.segments[0], place, bytes);
        match first.as_ref().and_then(|bytes| bytes.get_ref(0).ok()) {
            Some(first) => first.store(count),
            None => segment::write(view.memory, &self.segments, place, &count),
        }
        self.segments.drop_front(segments);
        self.held.drop_front(buffers);
        let bytes = whole - header::BYTES;
        self.link.counters.received.passed(bytes);
        self.link.receive_limiter.charge(Cost {
            operations: 1,
            bytes: bytes as u64,
        });
    }
}
