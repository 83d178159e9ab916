//! A queue's registers, as the driver wrote them.

use super::state::QueueState;
use crate::GuestMemory;
use virtio_queue::{Queue, QueueT};

/// Ring addresses, size and positions of one queue. They may have any value;
/// [`build`](QueueRegisters::build) checks them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct QueueRegisters {
    pub(super) max_size: u16,
    pub(super) size: u32,
    pub(super) ready: bool,
    pub(super) descriptors: u64,
    pub(super) driver_ring: u64,
    pub(super) device_ring: u64,
    next_avail: u16,
    next_used: u16,
}

impl QueueRegisters {
    pub(super) fn new(max_size: u16) -> QueueRegisters {
        QueueRegisters {
            max_size,
            size: u32::from(max_size),
            ready: false,
            descriptors: 0,
            driver_ring: 0,
            device_ring: 0,
            next_avail: 0,
            next_used: 0,
        }
    }

    /// The queue, if its size, alignment (Virtio 1.3 §2.7) and place in guest memory are valid.
    pub(super) fn build(&self, memory: &GuestMemory, event_idx: bool) -> Option<Queue> {
        let queue = Queue::try_from(virtio_queue::QueueState {
            max_size: self.max_size,
            next_avail: self.next_avail,
            next_used: self.next_used,
            event_idx_enabled: event_idx,
            size: u16::try_from(self.size).ok()?,
            ready: true,
            desc_table: self.descriptors,
            avail_ring: self.driver_ring,
            used_ring: self.device_ring,
        })
        .ok()?;
        // Rings at address zero mean that the registers were not written, and the queue library
        // regards such a queue as not set up.
        let placed = [self.descriptors, self.driver_ring, self.device_ring]
            .iter()
            .all(|address| *address != 0);
        (placed && queue.is_valid(memory)).then_some(queue)
    }

    /// Stores the position up to which a device has served the queue.
    pub(super) fn keep_position(&mut self, queue: &Queue) {
        self.next_avail = queue.next_avail();
        self.next_used = queue.next_used();
    }

    pub(super) fn save(&self) -> QueueState {
        QueueState {
            size: self.size,
            ready: self.ready,
            descriptors: self.descriptors,
            driver_ring: self.driver_ring,
            device_ring: self.device_ring,
            next_avail: self.next_avail,
            next_used: self.next_used,
        }
    }

    pub(super) fn restore(max_size: u16, state: &QueueState) -> QueueRegisters {
        QueueRegisters {
            max_size,
            size: state.size,
            ready: state.ready,
            descriptors: state.descriptors,
            driver_ring: state.driver_ring,
            device_ring: state.device_ring,
            next_avail: state.next_avail,
            next_used: state.next_used,
        }
    }
}
