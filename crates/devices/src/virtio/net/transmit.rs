//! Sends frames from the guest.

use super::backend::{Endpoint, Sent};
use super::config::Link;
use super::frame::Frame;
use super::header::{self, Lead};
use super::{FRAME_MAX, FRAMES_PER_TURN};
use crate::GuestMemory;
use crate::virtio::queue::Cost;
use crate::virtio::queue::chain::Walk;
use crate::virtio::queue::ring::{Ring, Used, used};
use crate::virtio::queue::segment::{self, Region, Segment};
use crate::virtio::queue::vectored::{MESSAGE_SEGMENTS_MAX, Vectors};
use jiffy_sys::log_limit::LogLimit;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use thiserror::Error;

/// Frames that were sent since the last interrupt are few and small up to this cost.
const FEW: Cost = Cost {
    operations: 32,
    bytes: 16 << 10,
};

/// How a turn ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    /// There is nothing to do until an event comes.
    Done,
    /// There may be more.
    More,
    /// There is more, but the backend is not ready.
    Blocked,
    /// There is more, which the rate limit allows after this many nanoseconds.
    Later(u64),
    /// There may be more to do when an event comes, and there is after this many nanoseconds.
    Within(u64),
}

/// Whether the driver wants an interrupt for frames that were sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    No,
    /// They are few and small: the guest does not need their memory at once.
    Soon,
    Now,
}

impl Wanted {
    fn for_sent(sent: Cost) -> Wanted {
        match sent.operations <= FEW.operations && sent.bytes <= FEW.bytes {
            true => Wanted::Soon,
            false => Wanted::Now,
        }
    }
}

/// Why a frame is dropped.
#[derive(Debug, Error)]
enum Malformed {
    #[error("a chain of descriptors that is broken, or has one that the device writes")]
    Chain,
    #[error("buffers outside of guest memory")]
    Memory,
    #[error("a frame of {0} bytes, with its header")]
    Length(usize),
    #[error(transparent)]
    Header(#[from] header::Refused),
}

/// The transmit queue of a pair.
pub(super) struct Transmit {
    ring: Ring,
    features: u64,
    link: Arc<Link>,
    log: Arc<LogLimit>,
    /// Chains that were sent or dropped, and that the driver does not see yet; none between turns.
    returned: Vec<Used>,
    /// The frame that is being sent.
    segments: Vec<Segment>,
    vectors: Vectors,
    /// What was sent since the last interrupt.
    since_interrupt: Cost,
}

impl Transmit {
    pub(super) fn new(ring: Ring, features: u64, link: Arc<Link>, log: Arc<LogLimit>) -> Transmit {
        Transmit {
            ring,
            features,
            link,
            log,
            returned: Vec::new(),
            segments: Vec::new(),
            vectors: Vectors::default(),
            since_interrupt: Cost::default(),
        }
    }

    pub(super) fn ring(&self) -> &Ring {
        &self.ring
    }

    pub(super) fn into_ring(self) -> Ring {
        self.ring
    }

    /// Whether the driver wants an interrupt for the chains of the last turn.
    pub(super) fn wanted_interrupt(&mut self, memory: &GuestMemory) -> Wanted {
        match self.ring.wants_interrupt(memory) {
            true => Wanted::for_sent(self.since_interrupt),
            false => Wanted::No,
        }
    }

    /// The driver got an interrupt.
    pub(super) fn interrupted(&mut self) {
        self.since_interrupt = Cost::default();
    }

    /// Sends frames for one turn. A frame that was taken from the queue is sent, dropped, or put
    /// back into the queue.
    pub(super) fn serve(&mut self, memory: &GuestMemory, endpoint: &mut Endpoint) -> Turn {
        self.ring.disable_notification(memory);
        let mut turn = Turn::More;
        // Of all chains, because a lookup takes as long as the rest of a chain.
        let (table, mut region) = (self.ring.table(memory), Region::default());
        for _ in 0..FRAMES_PER_TURN {
            let Some(chain) = self.ring.pop(memory) else {
                if self.ring.enable_notification(memory) {
                    self.ring.disable_notification(memory);
                    continue;
                }
                turn = Turn::Done;
                break;
            };
            let head = chain.head();
            match self.gather(memory, &mut region, table.walk(head)) {
                Ok((lead, _)) if lead.frame()[6..12] != self.link.mac.0 => {
                    self.link.counters.spoofed.fetch_add(1, Ordering::Relaxed);
                }
                Ok((lead, _)) if !self.link.lets_pass(lead.frame()) => {
                    self.link.counters.refused.fetch_add(1, Ordering::Relaxed);
                }
                Ok((lead, bytes)) => {
                    let cost = Cost {
                        operations: 1,
                        bytes: bytes as u64,
                    };
                    if let Err(wait_ns) = self.link.send_limiter.try_admit(cost) {
                        self.ring.put_back();
                        turn = Turn::Later(wait_ns);
                        break;
                    }
                    if self.send((memory, &mut region), endpoint, &lead, bytes) {
                        self.ring.put_back();
                        turn = Turn::Blocked;
                        break;
                    }
                    self.since_interrupt.bytes += cost.bytes;
                }
                Err(malformed) => {
                    self.link.counters.sent.dropped();
                    tracing::debug!(%malformed, "a guest's frame was dropped");
                }
            }
            self.returned.push(used(head, 0));
        }
        self.since_interrupt.operations += self.returned.len() as u64;
        self.ring.give_back_together(memory, &mut self.returned);
        turn
    }

    /// Gathers and checks a frame: returns its lead and the bytes of the frame. All of it is in
    /// `segments`.
    fn gather<'a>(
        &mut self,
        memory: &'a GuestMemory,
        region: &mut Region<'a>,
        chain: Walk<'_>,
    ) -> Result<(Lead, usize), Malformed> {
        self.segments.clear();
        let mut total = 0usize;
        let mut whole = false;
        for descriptor in chain {
            if descriptor.is_writable() {
                return Err(Malformed::Chain);
            }
            total = total.saturating_add(descriptor.length as usize);
            if total > header::BYTES + FRAME_MAX {
                return Err(Malformed::Length(total));
            }
            whole = !descriptor.has_next();
            let segment = Segment {
                address: descriptor.address,
                length: descriptor.length as usize,
            };
            if segment.length == 0 {
                continue;
            }
            if !region.contains(memory, &segment) {
                return Err(Malformed::Memory);
            }
            if self.segments.len() == MESSAGE_SEGMENTS_MAX {
                return Err(Malformed::Chain);
            }
            self.segments.push(segment);
        }
        if !whole {
            return Err(Malformed::Chain);
        }
        let guarded = self.link.gate.is_some();
        let lead = Lead::new(guarded, |bytes| {
            let length = total.min(bytes.len());
            let bytes = &mut bytes[..length];
            let first = self.segments.first();
            match first.and_then(|first| region.bytes(first, 0, length)) {
                Some(there) => _ = there.copy_to(bytes),
                None => segment::read(memory, &self.segments, 0, bytes),
            }
            length
        });
        let mut lead = lead.ok_or(Malformed::Length(total))?;
        let bytes = total - header::BYTES;
        let given = lead.header();
        *given = header::check(given, bytes as u32, self.features)?;
        Ok((lead, bytes))
    }

    /// Sends a frame; returns true if the backend is not ready for it.
    fn send<'a>(
        &mut self,
        (memory, region): (&'a GuestMemory, &mut Region<'a>),
        endpoint: &mut Endpoint,
        lead: &Lead,
        bytes: usize,
    ) -> bool {
        let frame = Frame {
            memory,
            region,
            lead,
            segments: &self.segments,
            vectors: &mut self.vectors,
        };
        match endpoint.send(frame) {
            Ok(Sent::Whole) => self.link.counters.sent.passed(bytes),
            Ok(Sent::Nowhere) => self.link.counters.sent.dropped(),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
            Err(error) => {
                self.link.counters.sent.dropped();
                if self.log.admits() {
                    tracing::debug!(%error, "the host refused a guest's frame");
                }
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_for_few_small_frames_is_an_interrupt_not_urgent() {
        let sent = |operations, bytes| Wanted::for_sent(Cost { operations, bytes });
        assert_eq!(sent(1, 66), Wanted::Soon);
        assert_eq!(sent(FEW.operations, FEW.bytes), Wanted::Soon);
        assert_eq!(sent(FEW.operations + 1, 2000), Wanted::Now);
        assert_eq!(sent(1, FEW.bytes + 1), Wanted::Now);
    }
}
