//! The three virtqueues (Virtio 1.3 §5.10.2).

use crate::GuestMemory;
use crate::log_limit::LogLimit;
use crate::virtio::device::{ActivateError, ActiveQueue, Interrupt};
use crate::virtio::signal::driver_wants_interrupt;
use std::num::Wrapping;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use virtio_queue::{DescriptorChain, QueueOwnedT, QueueT};

/// Entries of the receive, transmit and event queue. Linux fills the whole
/// receive queue with 4 KiB buffers when it probes the device: 64 hold as much
/// as a connection's default credit and cost a quarter of 256 at boot. A
/// zero-copy send takes up to 18 entries of the transmit queue. Linux posts 8
/// event buffers.
pub const QUEUE_SIZES: [u16; 3] = [64, 128, 8];

/// The queues in use, and what they need.
pub struct Rings {
    /// Guest RAM.
    pub memory: Arc<GuestMemory>,
    /// Tells the driver.
    pub interrupt: Arc<dyn Interrupt>,
    /// Packets to the guest.
    pub receive: Ring,
    /// Packets from the guest.
    pub transmit: Ring,
    /// Events to the guest; a driver may leave it out.
    pub event: Option<Ring>,
}

impl Rings {
    /// Sorts the queues of an activation.
    pub fn new(
        memory: Arc<GuestMemory>,
        interrupt: Arc<dyn Interrupt>,
        queues: Vec<Option<ActiveQueue>>,
        event_idx: bool,
        log: &Arc<LogLimit>,
    ) -> Result<Rings, ActivateError> {
        let mut queues = queues.into_iter().map(|queue| {
            let mut active = queue?;
            active.queue.set_event_idx(event_idx);
            Some(Ring {
                active,
                interrupt: interrupt.clone(),
                log: log.clone(),
                returned: false,
                broken: false,
            })
        });
        let mut next = || queues.next().flatten();
        let receive = next().ok_or(ActivateError::MissingQueue(0))?;
        let transmit = next().ok_or(ActivateError::MissingQueue(1))?;
        let event = next();
        Ok(Rings {
            memory,
            interrupt,
            receive,
            transmit,
            event,
        })
    }

    /// Interrupts the guest if it wants to know of what was returned.
    pub fn notify(&mut self) {
        let memory = &*self.memory;
        let rings = [&mut self.receive, &mut self.transmit].into_iter();
        let mut wanted = false;
        for ring in rings.chain(self.event.as_mut()) {
            wanted |= ring.wants_interrupt(memory);
        }
        if wanted {
            self.interrupt.used_buffers();
        }
    }

    /// All rings.
    pub fn each(&self) -> impl Iterator<Item = &Ring> {
        [&self.receive, &self.transmit]
            .into_iter()
            .chain(&self.event)
    }

    /// Gives the queues back, by index.
    pub fn into_queues(self) -> Vec<ActiveQueue> {
        let rings = [Some(self.receive), Some(self.transmit), self.event];
        rings
            .into_iter()
            .flatten()
            .map(|ring| ring.active)
            .collect()
    }
}

/// One queue.
pub struct Ring {
    active: ActiveQueue,
    interrupt: Arc<dyn Interrupt>,
    log: Arc<LogLimit>,
    /// Buffers were returned since the driver was last told.
    returned: bool,
    /// The driver made nonsense of the ring; only a reset helps.
    broken: bool,
}

impl Ring {
    /// The queue and its doorbell.
    pub fn active(&self) -> &ActiveQueue {
        &self.active
    }

    /// Takes the next chain the driver made available.
    pub fn pop<'m>(&mut self, memory: &'m GuestMemory) -> Option<DescriptorChain<&'m GuestMemory>> {
        if self.broken {
            return None;
        }
        match self.active.queue.iter(memory) {
            Ok(mut chains) => chains.next(),
            Err(error) => {
                let queue = self.active.index;
                if self.log.admits() {
                    tracing::warn!(queue, %error, "vsock: the guest broke a queue; it is left alone");
                }
                self.broken = true;
                self.interrupt.needs_reset();
                None
            }
        }
    }

    /// Puts the chain that was popped last back.
    pub fn unpop(&mut self) {
        self.active.queue.go_to_previous_position();
    }

    /// Returns a chain to the driver with `length` bytes written.
    pub fn give_back(&mut self, memory: &GuestMemory, head: u16, length: u32) {
        match self.active.queue.add_used(memory, head, length) {
            Ok(()) => self.returned = true,
            // The head came from the driver and does not exist.
            Err(error) => tracing::debug!(%error, "vsock: a chain cannot be returned"),
        }
    }

    /// Asks the driver not to ring.
    pub fn mute(&mut self, memory: &GuestMemory) {
        // Fails only for rings outside of RAM, which the transport refuses.
        let _ = self.active.queue.disable_notification(memory);
    }

    /// Asks the driver to ring; true if more came meanwhile.
    pub fn unmute(&mut self, memory: &GuestMemory) -> bool {
        !self.broken
            && self
                .active
                .queue
                .enable_notification(memory)
                .unwrap_or(false)
    }

    /// Asks the driver to ring for the next chain it adds, even if it has
    /// chains here already; returns how many it has ever added, wrapping.
    pub fn ring_for_next(&mut self, memory: &GuestMemory) -> u16 {
        let added = self.added(memory);
        let queue = &mut self.active.queue;
        let position = queue.next_avail();
        queue.set_next_avail(added);
        let _ = queue.enable_notification(memory);
        queue.set_next_avail(position);
        added
    }

    /// How many chains the driver has ever added, wrapping.
    pub fn added(&self, memory: &GuestMemory) -> u16 {
        let added = self.active.queue.avail_idx(memory, Ordering::Acquire);
        added.unwrap_or(Wrapping(0)).0
    }

    fn wants_interrupt(&mut self, memory: &GuestMemory) -> bool {
        std::mem::take(&mut self.returned) && driver_wants_interrupt(&mut self.active.queue, memory)
    }
}
