//! Whether the driver wants an interrupt for used buffers (Virtio 1.3 §2.7.7).

use crate::GuestMemory;
use std::num::Wrapping;
use std::sync::atomic::{Ordering, fence};
use virtio_bindings::virtio_ring::VRING_AVAIL_F_NO_INTERRUPT;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};

/// Reads from the rings whether the driver wants an interrupt, after used buffers were added: from
/// `used_event` with EVENT_IDX, otherwise from the available ring's flag, which the queue library
/// ignores.
pub fn driver_wants_interrupt(queue: &mut Queue, memory: &GuestMemory) -> bool {
    if queue.event_idx_enabled() {
        return queue.needs_notification(memory).unwrap_or(true);
    }
    // The used index must be visible before the flag is read.
    fence(Ordering::SeqCst);
    let flags: u16 = memory
        .load(GuestAddress(queue.avail_ring()), Ordering::Relaxed)
        .unwrap_or(0);
    u32::from(u16::from_le(flags)) & VRING_AVAIL_F_NO_INTERRUPT == 0
}

/// The same for all buffers that were returned since the used index was `before`. The library only
/// knows those that it returned itself, one by one.
pub(crate) fn driver_wants_interrupt_since(
    queue: &Queue,
    memory: &GuestMemory,
    before: Wrapping<u16>,
) -> bool {
    let used = Wrapping(queue.next_used());
    // The used index must be visible before the driver's fields are read.
    fence(Ordering::SeqCst);
    let read = |offset: u64| -> u16 {
        let place = GuestAddress(queue.avail_ring() + offset);
        memory
            .load(place, Ordering::Relaxed)
            .map_or(0, u16::from_le)
    };
    if queue.event_idx_enabled() {
        let event = Wrapping(read(4 + 2 * u64::from(queue.size())));
        return used - event - Wrapping(1) < used - before;
    }
    used != before && u32::from(read(0)) & VRING_AVAIL_F_NO_INTERRUPT == 0
}
