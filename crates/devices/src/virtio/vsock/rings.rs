//! The three virtqueues (Virtio 1.3 §5.10.2).

use crate::GuestMemory;
use crate::virtio::device::{ActivateError, ActiveQueue, Interrupt};
use crate::virtio::queue::ring::Ring;
use jiffy_sys::log_limit::LogLimit;
use std::sync::Arc;
use virtio_queue::QueueT;

/// Entries of the receive, transmit and event queue. Linux fills the whole receive queue with 4 KiB
/// buffers when it probes the device: 64 hold as much as a connection's default credit and cost a
/// quarter of 256 at boot. A zero-copy send takes up to 18 entries of the transmit queue. Linux
/// posts 8 event buffers.
pub const QUEUE_SIZES: [u16; 3] = [64, 128, 8];

/// The active queues, and what they need.
pub struct Rings {
    /// Guest RAM.
    pub memory: Arc<GuestMemory>,
    /// Interrupts the driver.
    pub interrupt: Arc<dyn Interrupt>,
    /// Packets to the guest.
    pub(super) receive: Ring,
    /// Packets from the guest.
    pub(super) transmit: Ring,
    /// Events to the guest; a driver need not enable it.
    pub(super) event: Option<Ring>,
}

impl Rings {
    /// Assigns the queues of an activation.
    ///
    /// # Errors
    ///
    /// [`ActivateError::MissingQueue`] if the driver did not enable the receive or the transmit
    /// queue.
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
            Some(Ring::new("vsock", active, interrupt.clone(), log.clone()))
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

    /// Interrupts the guest if it wants an interrupt for the returned buffers.
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
    pub(super) fn each(&self) -> impl Iterator<Item = &Ring> {
        [&self.receive, &self.transmit]
            .into_iter()
            .chain(&self.event)
    }

    /// Returns the queues, by index.
    pub fn into_queues(self) -> Vec<ActiveQueue> {
        let rings = [Some(self.receive), Some(self.transmit), self.event];
        rings.into_iter().flatten().map(Ring::into_active).collect()
    }
}
