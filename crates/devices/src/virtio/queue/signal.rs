//! Whether the driver wants an interrupt for used buffers (Virtio 1.3 §2.7.7).

use crate::GuestMemory;
use std::sync::atomic::{Ordering, fence};
use virtio_bindings::virtio_ring::VRING_AVAIL_F_NO_INTERRUPT;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};

/// Reads the driver's wish from the rings, after used buffers were added: `used_event` if
/// EVENT_IDX is in use, the flag of the available ring if not. The queue library does not
/// look at the flag.
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
