//! An active queue: taking and returning chains, interrupts.

use super::chain::{Chain, Table};
use super::signal::{driver_wants_interrupt, driver_wants_interrupt_since};
use crate::GuestMemory;
use crate::virtio::device::{ActiveQueue, Interrupt};
use jiffy_sys::log_limit::LogLimit;
use std::num::Wrapping;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

/// Offset of an available ring's entries, after flags and index (Virtio 1.3 §2.7.6).
const ENTRIES: u64 = 4;
/// Entries of an available ring that are read at once.
const HEADS: usize = 32;

/// The next chain that the driver made available, if there is one. An error means that the driver
/// broke the queue.
pub(crate) fn next_chain(
    queue: &mut Queue,
    memory: &GuestMemory,
) -> Result<Option<Chain>, virtio_queue::Error> {
    let Some(found) = queue.iter(memory)?.next() else {
        return Ok(None);
    };
    Ok(Some(Chain::of(queue, &found)))
}

/// Puts a chain that was taken, and not returned, before the next one, so that it is taken again.
///
/// This writes an entry of the available ring, which usually only drivers do. The entry is one that
/// the device has taken. A driver overwrites it only when it has fewer requests in flight than the
/// queue has entries, and this one is in flight. Chains behind it may have been returned, so a
/// position alone can't tell what is still to be done; this way a saved queue consists only of its
/// rings and its position.
pub(crate) fn put_back(
    queue: &mut Queue,
    memory: &GuestMemory,
    head: u16,
) -> Result<(), GuestMemoryError> {
    queue.go_to_previous_position();
    let entry = u64::from(queue.next_avail() % queue.size());
    let address = queue.avail_ring() + ENTRIES + entry * size_of::<u16>() as u64;
    memory.write_obj(head.to_le(), GuestAddress(address))
}

/// Answers at most a queue's worth of requests. `act` returns the number of bytes that it wrote to
/// a chain's buffers.
pub(crate) fn answer_each(
    active: &mut ActiveQueue,
    memory: &GuestMemory,
    interrupt: &dyn Interrupt,
    mut act: impl FnMut(Chain) -> u32,
) -> Result<(), virtio_queue::Error> {
    let queue = &mut active.queue;
    let mut answered = false;
    for _ in 0..queue.size() {
        let Some(chain) = next_chain(queue, memory)? else {
            break;
        };
        let written = act(chain);
        queue.add_used(memory, chain.head(), written)?;
        answered = true;
    }
    if answered && driver_wants_interrupt(queue, memory) {
        interrupt.used_buffers();
    }
    Ok(())
}

/// A chain that is returned, as the used ring has it (Virtio 1.3 §2.7.8).
pub(crate) type Used = [u8; 8];

/// The chain with this head, to which `length` bytes were written.
pub(crate) fn used(head: u16, length: u32) -> Used {
    (u64::from(head) | u64::from(length) << 32).to_le_bytes()
}

/// One active queue.
pub(crate) struct Ring {
    active: ActiveQueue,
    interrupt: Arc<dyn Interrupt>,
    log: Arc<LogLimit>,
    /// The device's name, for messages.
    device: &'static str,
    /// The used index when it was last read whether the driver wants an interrupt.
    signalled_used: Wrapping<u16>,
    /// The driver broke the ring; only a reset helps.
    broken: bool,
    /// Entries of the available ring, little endian, that were read: `heads_count` from the
    /// position `heads_first` on. Drivers don't change them before the chains are returned.
    heads: [[u8; 2]; HEADS],
    heads_first: u16,
    heads_count: u16,
}

impl Ring {
    /// A queue of `device`, which is a name for messages.
    pub fn new(
        device: &'static str,
        active: ActiveQueue,
        interrupt: Arc<dyn Interrupt>,
        log: Arc<LogLimit>,
    ) -> Ring {
        Ring {
            signalled_used: Wrapping(active.queue.next_used()),
            active,
            interrupt,
            log,
            device,
            broken: false,
            heads: [[0; 2]; HEADS],
            heads_first: 0,
            heads_count: 0,
        }
    }

    /// The queue, for a later activation.
    pub fn into_active(self) -> ActiveQueue {
        self.active
    }

    /// The table of its descriptors.
    pub fn table<'a>(&self, memory: &'a GuestMemory) -> Table<'a> {
        Table::of_queue(&self.active.queue, memory)
    }

    /// The queue and its doorbell.
    pub fn active(&self) -> &ActiveQueue {
        &self.active
    }

    /// Takes the next chain that the driver made available.
    #[inline]
    pub fn pop(&mut self, memory: &GuestMemory) -> Option<Chain> {
        let position = self.active.queue.next_avail();
        let mut within = position.wrapping_sub(self.heads_first);
        if within >= self.heads_count {
            self.read_heads(memory);
            within = 0;
        }
        let head = self.heads[..usize::from(self.heads_count)].get(usize::from(within))?;
        let queue = &mut self.active.queue;
        queue.set_next_avail(position.wrapping_add(1));
        Some(Chain::at(queue, u16::from_le_bytes(*head)))
    }

    /// Reads the heads of the next chains. Reading each by itself takes longer than all else that a
    /// small frame needs here.
    fn read_heads(&mut self, memory: &GuestMemory) {
        self.heads_first = self.active.queue.next_avail();
        self.heads_count = 0;
        if self.broken {
            return;
        }
        match self.read_available(memory) {
            Ok(count) => self.heads_count = count,
            Err(error) => {
                let (device, queue) = (self.device, self.active.index);
                if self.log.admits() {
                    tracing::warn!(device, queue, %error, "a guest broke a queue; it is not served until a reset");
                }
                self.broken = true;
                self.interrupt.needs_reset();
            }
        }
    }

    fn read_available(&mut self, memory: &GuestMemory) -> Result<u16, virtio_queue::Error> {
        let queue = &self.active.queue;
        let position = queue.next_avail();
        let added = queue.avail_idx(memory, Ordering::Acquire)?.0;
        let waiting = added.wrapping_sub(position);
        if waiting > queue.size() {
            return Err(virtio_queue::Error::InvalidAvailRingIndex);
        }
        let entry = position % queue.size();
        let count = waiting.min(queue.size() - entry).min(HEADS as u16);
        let place = queue.avail_ring() + ENTRIES + 2 * u64::from(entry);
        let heads = self.heads[..usize::from(count)].as_flattened_mut();
        memory
            .read_slice(heads, GuestAddress(place))
            .map_err(virtio_queue::Error::GuestMemory)?;
        Ok(count)
    }

    /// Puts the chain that was taken last back, to be taken again.
    pub fn put_back(&mut self) {
        self.put_back_last(1);
    }

    /// Puts the last `count` chains back, to be taken again.
    pub fn put_back_last(&mut self, count: u16) {
        let queue = &mut self.active.queue;
        queue.set_next_avail(queue.next_avail().wrapping_sub(count));
    }

    /// Returns a chain to the driver with `length` bytes written.
    pub fn give_back(&mut self, memory: &GuestMemory, head: u16, length: u32) {
        match self.active.queue.add_used(memory, head, length) {
            Ok(()) => {}
            // The driver gave a head that does not exist.
            Err(error) => {
                let device = self.device;
                tracing::debug!(device, %error, "a chain cannot be returned");
            }
        }
    }

    /// Returns several chains, so that the driver sees all of them at once; leaves the list empty.
    pub fn give_back_together(&mut self, memory: &GuestMemory, chains: &mut Vec<Used>) {
        if chains.is_empty() {
            return;
        }
        let queue = &mut self.active.queue;
        let size = queue.size();
        // The driver may have given a head that does not exist.
        chains.retain(|chain| (u64::from_le_bytes(*chain) as u32) < u32::from(size));
        let mut next = queue.next_used();
        let mut rest = chains.as_slice();
        while !rest.is_empty() {
            let entry = next % size;
            let (now, later) = rest.split_at(rest.len().min(usize::from(size - entry)));
            let place =
                queue.used_ring() + ENTRIES + (size_of::<Used>() * usize::from(entry)) as u64;
            // The transport has checked that the ring is in guest memory.
            let _ = memory.write_slice(now.as_flattened(), GuestAddress(place));
            next = next.wrapping_add(now.len() as u16);
            rest = later;
        }
        if !chains.is_empty() {
            queue.set_next_used(next);
            let index = GuestAddress(queue.used_ring() + 2);
            let _ = memory.store(next.to_le(), index, Ordering::Release);
        }
        chains.clear();
    }

    /// Asks the driver not to notify the device of new chains.
    #[inline]
    pub fn disable_notification(&mut self, memory: &GuestMemory) {
        let queue = &mut self.active.queue;
        // With an event index, nothing has to be written.
        if !queue.event_idx_enabled() {
            // Fails only for rings outside of RAM, which the transport refuses.
            let _ = queue.disable_notification(memory);
        }
    }

    /// Asks the driver to notify the device of new chains; true if some came meanwhile.
    pub fn enable_notification(&mut self, memory: &GuestMemory) -> bool {
        !self.broken
            && self
                .active
                .queue
                .enable_notification(memory)
                .unwrap_or(false)
    }

    /// Asks the driver to notify the device of the next chain it adds, even if chains are
    /// waiting; returns how many it has ever added, wrapping.
    pub fn notify_for_next(&mut self, memory: &GuestMemory) -> u16 {
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

    /// Whether the driver wants an interrupt for the chains that were returned since the last call.
    pub fn wants_interrupt(&mut self, memory: &GuestMemory) -> bool {
        let used = Wrapping(self.active.queue.next_used());
        let before = std::mem::replace(&mut self.signalled_used, used);
        used != before && driver_wants_interrupt_since(&self.active.queue, memory, before)
    }

    /// Interrupts the driver if it wants an interrupt.
    pub fn notify(&mut self, memory: &GuestMemory) {
        if self.wants_interrupt(memory) {
            self.interrupt.used_buffers();
        }
    }
}
