//! The entropy device (Virtio 1.3 §5.4): the kernel's random numbers for the
//! guest.
//!
//! It has no thread. A guest requests a few dozen bytes a few times in its life, so the vCPU that
//! notifies does the work.

#[cfg(test)]
mod tests;

use crate::GuestMemory;
use crate::virtio::device::{ActivateError, Activation, ActiveQueue, Interrupt, VirtioDevice};
use crate::virtio::queue::chain::{Chain, Descriptor, Walk};
use crate::virtio::queue::ring::answer_each;
use jiffy_sys::log_limit::LogLimit;
use rustix::rand::GetRandomFlags;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_INDIRECT_DESC;
use vm_memory::{Address, Bytes};

/// Entries of the queue; with [`REQUEST_BYTES_MAX`] they bound the cost of a notification.
const QUEUE_SIZE: u16 = 8;

/// Most bytes for one request. A device may return fewer bytes than requested, but at least one
/// (Virtio 1.3 §5.4.6.2).
pub const REQUEST_BYTES_MAX: usize = 64 * 1024;

/// Bytes requested from the kernel at a time: up to this size, getrandom(2) is never cut short by a
/// signal.
const CHUNK: usize = 256;

/// The entropy device.
#[derive(Default)]
pub struct Entropy {
    log: LogLimit,
    running: Option<Running>,
}

/// A saved entropy device: it has no state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EntropyState {}

struct Running {
    memory: Arc<GuestMemory>,
    interrupt: Arc<dyn Interrupt>,
    active: ActiveQueue,
}

impl Entropy {
    /// A new device.
    pub fn new() -> Entropy {
        Entropy::default()
    }

    /// Restores a saved device.
    pub fn restore(_state: &EntropyState) -> Entropy {
        Entropy::new()
    }

    /// The device's state.
    pub fn save(&self) -> EntropyState {
        EntropyState {}
    }
}

impl VirtioDevice for Entropy {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_RNG
    }

    fn queue_max_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE]
    }

    // EVENT_IDX is not offered: so the driver notifies after every buffer that it adds, and no
    // buffer is left unanswered when a notification stops after a queue's worth.
    fn features(&self) -> u64 {
        1 << VIRTIO_RING_F_INDIRECT_DESC
    }

    fn read_config(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let active = activation
            .queues
            .into_iter()
            .next()
            .flatten()
            .ok_or(ActivateError::MissingQueue(0))?;
        let running = self.running.insert(Running {
            memory: activation.memory,
            interrupt: activation.interrupt,
            active,
        });
        running.serve(&self.log);
        Ok(())
    }

    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        let running = self.running.take();
        running.map(|running| running.active).into_iter().collect()
    }

    fn waits_on_doorbells(&self) -> bool {
        false
    }

    fn notified(&mut self, _queue: u16) {
        if let Some(running) = &mut self.running {
            running.serve(&self.log);
        }
    }
}

impl Running {
    fn serve(&mut self, log: &LogLimit) {
        if let Err(error) = self.try_serve() {
            if log.admits() {
                tracing::warn!(%error, "a guest broke the queue of its entropy device");
            }
            self.interrupt.needs_reset();
        }
    }

    /// Answers at most a queue's worth of requests.
    fn try_serve(&mut self) -> Result<(), virtio_queue::Error> {
        let memory = self.memory.as_ref();
        answer_each(&mut self.active, memory, &*self.interrupt, |chain| {
            fill(memory, chain)
        })
    }
}

/// Fills the buffers of one request; returns the number of bytes written.
fn fill(memory: &GuestMemory, chain: Chain) -> u32 {
    let mut written = 0;
    let mut chunk = [0; CHUNK];
    for buffer in Walk::new(memory, chain).filter(Descriptor::is_writable) {
        let mut done = 0;
        while done < buffer.length as usize && written < REQUEST_BYTES_MAX {
            let count = CHUNK
                .min(buffer.length as usize - done)
                .min(REQUEST_BYTES_MAX - written);
            let random = &mut chunk[..count];
            let target = buffer.address.checked_add(done as u64);
            // The system call is used, because a sandboxed thread can't open files.
            let filled = rustix::rand::getrandom(&mut *random, GetRandomFlags::empty())
                == Ok(random.len())
                && target.is_some_and(|target| memory.write_slice(random, target).is_ok());
            if !filled {
                return written as u32;
            }
            done += count;
            written += count;
        }
    }
    written as u32
}
