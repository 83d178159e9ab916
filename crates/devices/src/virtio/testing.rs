//! The driver's side, for tests and fuzzing: rings in real guest memory, an interrupt that counts,
//! and threads without a sandbox.

use super::device::{Activation, ActiveQueue, Interrupt, Job, VirtioDevice, WorkerRole, Workers};
use crate::GuestMemory;
use std::io;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Another descriptor follows.
pub const NEXT: u16 = 1;
/// The device writes this buffer.
pub const WRITE: u16 = 2;
/// The buffer is a table of descriptors.
pub const INDIRECT: u16 = 4;

/// How long a test waits for a device before it fails.
pub const TIMEOUT: Duration = Duration::from_secs(300);

/// Guest memory of `bytes` bytes from address 0.
pub fn memory(bytes: usize) -> Arc<GuestMemory> {
    Arc::new(GuestMemory::from_ranges(&[(GuestAddress(0), bytes)]).expect("guest memory"))
}

/// A copy of guest memory, such as a restore in another process has.
pub fn copy_of(memory: &GuestMemory) -> Arc<GuestMemory> {
    use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};
    let ranges: Vec<(GuestAddress, usize)> = memory
        .iter()
        .map(|region| (region.start_addr(), region.len() as usize))
        .collect();
    let copy = GuestMemory::from_ranges(&ranges).expect("guest memory");
    for (start, length) in ranges {
        let mut bytes = vec![0; length];
        memory.read_slice(&mut bytes, start).expect("in range");
        copy.write_slice(&bytes, start).expect("in range");
    }
    Arc::new(copy)
}

/// One buffer of a request, as the driver describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Buffer {
    /// Guest physical address.
    pub address: u64,
    /// Bytes.
    pub length: u32,
    /// Whether the device writes it.
    pub writable: bool,
}

impl Buffer {
    /// A buffer that the device reads.
    pub fn readable(address: u64, length: u32) -> Buffer {
        Buffer {
            address,
            length,
            writable: false,
        }
    }

    /// A buffer that the device writes.
    pub fn writable(address: u64, length: u32) -> Buffer {
        Buffer {
            address,
            length,
            writable: true,
        }
    }
}

/// An element of the used ring: the head of a finished request and the bytes written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Used {
    /// Index of the request's first descriptor.
    pub head: u32,
    /// Bytes that the device wrote.
    pub length: u32,
}

/// A split virtqueue from the driver's side. The rings take the first [`DriverQueue::ring_bytes`]
/// bytes from `base`; the test chooses where buffers are.
#[derive(Debug, Clone)]
pub struct DriverQueue {
    memory: Arc<GuestMemory>,
    base: u64,
    size: u16,
    next_descriptor: u16,
    next_avail: u16,
    next_used: u16,
}

impl DriverQueue {
    /// Empty rings at `base`, a multiple of 16 and not 0.
    pub fn new(memory: Arc<GuestMemory>, base: u64, size: u16) -> DriverQueue {
        assert!(base != 0 && base.is_multiple_of(16) && size.is_power_of_two());
        let queue = DriverQueue {
            memory,
            base,
            size,
            next_descriptor: 0,
            next_avail: 0,
            next_used: 0,
        };
        let zeros = vec![0; Self::ring_bytes(size) as usize];
        queue.store(base, &zeros);
        queue
    }

    /// The same driver on a copy of its memory, as after a restore.
    pub fn over(&self, memory: Arc<GuestMemory>) -> DriverQueue {
        DriverQueue {
            memory,
            ..self.clone()
        }
    }

    /// Bytes of guest memory that rings of `size` entries take.
    pub fn ring_bytes(size: u16) -> u64 {
        let size = u64::from(size);
        (16 * size + 6 + 2 * size).next_multiple_of(4) + 6 + 8 * size
    }

    /// Address of the descriptor table.
    pub fn descriptors(&self) -> u64 {
        self.base
    }

    /// Address of the available ring.
    pub fn avail(&self) -> u64 {
        self.base + 16 * u64::from(self.size)
    }

    /// Address of the used ring.
    pub fn used(&self) -> u64 {
        let avail_bytes = 6 + 2 * u64::from(self.size);
        (self.avail() + avail_bytes).next_multiple_of(4)
    }

    /// Number of entries.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// The device's view of the queue, at position 0.
    pub fn device_queue(&self, event_idx: bool) -> Queue {
        Queue::try_from(virtio_queue::QueueState {
            max_size: self.size,
            size: self.size,
            ready: true,
            desc_table: self.descriptors(),
            avail_ring: self.avail(),
            used_ring: self.used(),
            event_idx_enabled: event_idx,
            ..Default::default()
        })
        .expect("the driver's queue is valid")
    }

    /// Writes one descriptor unchecked.
    pub fn write_descriptor(&self, table: u64, index: u16, buffer: Buffer, flags: u16, next: u16) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&buffer.address.to_le_bytes());
        bytes[8..12].copy_from_slice(&buffer.length.to_le_bytes());
        let flags = flags | if buffer.writable { WRITE } else { 0 };
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        self.store(table + 16 * u64::from(index), &bytes);
    }

    /// Offers a request of these buffers; returns its head. Descriptors are assigned round the
    /// table without checking whether they are in use, so at most `size` may be in flight.
    pub fn add(&mut self, buffers: &[Buffer]) -> u16 {
        assert!(!buffers.is_empty() && buffers.len() <= usize::from(self.size));
        let head = self.next_descriptor;
        for (position, buffer) in buffers.iter().enumerate() {
            let index = self.next_descriptor;
            self.next_descriptor = (index + 1) % self.size;
            let more = if position + 1 < buffers.len() {
                NEXT
            } else {
                0
            };
            self.write_descriptor(
                self.descriptors(),
                index,
                *buffer,
                more,
                self.next_descriptor,
            );
        }
        self.offer(head);
        head
    }

    /// Offers a request through an indirect table written at `table`.
    pub fn add_indirect(&mut self, table: u64, buffers: &[Buffer]) -> u16 {
        for (index, buffer) in (0u16..).zip(buffers) {
            let more = if usize::from(index) + 1 < buffers.len() {
                NEXT
            } else {
                0
            };
            self.write_descriptor(table, index, *buffer, more, index + 1);
        }
        let head = self.next_descriptor;
        self.next_descriptor = (head + 1) % self.size;
        let pointer = Buffer::readable(table, 16 * buffers.len() as u32);
        self.write_descriptor(self.descriptors(), head, pointer, INDIRECT, 0);
        self.offer(head);
        head
    }

    /// Adds a head to the available ring and increments its index.
    pub fn offer(&mut self, head: u16) {
        let slot = self.avail() + 4 + 2 * u64::from(self.next_avail % self.size);
        self.store(slot, &head.to_le_bytes());
        self.next_avail = self.next_avail.wrapping_add(1);
        self.set_avail_index(self.next_avail);
    }

    /// Writes the available ring's index unchecked.
    pub fn set_avail_index(&self, index: u16) {
        self.memory
            .store(
                index,
                GuestAddress(self.avail() + 2),
                std::sync::atomic::Ordering::SeqCst,
            )
            .expect("in guest memory");
    }

    /// Sets the available ring's flags (1: no interrupts).
    pub fn set_avail_flags(&self, flags: u16) {
        self.store(self.avail(), &flags.to_le_bytes());
    }

    /// Sets `used_event`: the entry for which an interrupt is wanted.
    pub fn set_used_event(&self, index: u16) {
        self.store(
            self.avail() + 4 + 2 * u64::from(self.size),
            &index.to_le_bytes(),
        );
    }

    /// The used ring's index: how many requests were ever finished, modulo 2¹⁶.
    pub fn used_index(&self) -> u16 {
        self.memory
            .load(
                GuestAddress(self.used() + 2),
                std::sync::atomic::Ordering::SeqCst,
            )
            .expect("in guest memory")
    }

    /// The next finished request, if there is one.
    pub fn next_used(&mut self) -> Option<Used> {
        if self.used_index() == self.next_used {
            return None;
        }
        let slot = self.used() + 4 + 8 * u64::from(self.next_used % self.size);
        self.next_used = self.next_used.wrapping_add(1);
        let mut bytes = [0; 8];
        self.load(slot, &mut bytes);
        let [a, b, c, d, e, f, g, h] = bytes;
        Some(Used {
            head: u32::from_le_bytes([a, b, c, d]),
            length: u32::from_le_bytes([e, f, g, h]),
        })
    }

    /// Waits for the next finished request.
    ///
    /// # Panics
    ///
    /// If it takes longer than [`TIMEOUT`].
    pub fn wait_used(&mut self) -> Used {
        let start = Instant::now();
        loop {
            if let Some(used) = self.next_used() {
                return used;
            }
            assert!(start.elapsed() < TIMEOUT, "the device did not answer");
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// The memory the rings are in.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Writes to guest memory.
    pub fn store(&self, address: u64, bytes: &[u8]) {
        self.memory
            .write_slice(bytes, GuestAddress(address))
            .expect("in guest memory");
    }

    /// Reads from guest memory.
    pub fn load(&self, address: u64, bytes: &mut [u8]) {
        self.memory
            .read_slice(bytes, GuestAddress(address))
            .expect("in guest memory");
    }
}

/// Counts a device's reports to the driver.
#[derive(Debug, Default)]
pub struct TestInterrupt {
    counts: Mutex<InterruptCounts>,
    rang: Condvar,
}

/// How often each report was made.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct InterruptCounts {
    /// `used_buffers` calls.
    pub used_buffers: u64,
    /// `config_changed` calls.
    pub config_changed: u64,
    /// `needs_reset` calls.
    pub needs_reset: u64,
}

impl TestInterrupt {
    /// A counter without reports.
    pub fn new() -> Arc<TestInterrupt> {
        Arc::new(TestInterrupt::default())
    }

    /// The current counts.
    pub fn counts(&self) -> InterruptCounts {
        *self.counts.lock().expect("interrupt counts")
    }

    /// Waits until the counts satisfy `wanted`.
    ///
    /// # Panics
    ///
    /// If it takes longer than [`TIMEOUT`].
    pub fn wait(&self, wanted: impl Fn(InterruptCounts) -> bool) -> InterruptCounts {
        let counts = self.counts.lock().expect("interrupt counts");
        let (counts, result) = self
            .rang
            .wait_timeout_while(counts, TIMEOUT, |counts| !wanted(*counts))
            .expect("interrupt counts");
        assert!(!result.timed_out(), "no such interrupt; {counts:?}");
        *counts
    }

    fn count(&self, change: impl FnOnce(&mut InterruptCounts)) {
        change(&mut self.counts.lock().expect("interrupt counts"));
        self.rang.notify_all();
    }
}

impl Interrupt for TestInterrupt {
    fn used_buffers(&self) {
        self.count(|counts| counts.used_buffers += 1);
    }
    fn config_changed(&self) {
        self.count(|counts| counts.config_changed += 1);
    }
    fn needs_reset(&self) {
        self.count(|counts| counts.needs_reset += 1);
    }
}

/// Threads without a sandbox.
#[derive(Debug, Default)]
pub struct ThreadWorkers;

impl Workers for ThreadWorkers {
    fn spawn(
        &self,
        _role: WorkerRole,
        name: &str,
        body: Box<dyn FnOnce() + Send>,
    ) -> io::Result<Job> {
        std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(body)
            .map(Job::from)
    }
}

/// An activated device without a transport.
pub struct Running<D: VirtioDevice> {
    /// The device.
    pub device: D,
    /// One doorbell per queue.
    pub doorbells: Vec<EventFd>,
    /// Its reports to the driver.
    pub interrupt: Arc<TestInterrupt>,
}

impl<D: VirtioDevice> Running<D> {
    /// Activates `device` with these queues and features.
    ///
    /// # Panics
    ///
    /// If the device refuses.
    pub fn start(
        mut device: D,
        memory: &Arc<GuestMemory>,
        queues: Vec<Queue>,
        features: u64,
    ) -> Running<D> {
        let interrupt = TestInterrupt::new();
        let mut doorbells = Vec::new();
        let mut active = Vec::new();
        for (index, queue) in (0u16..).zip(queues) {
            assert!(queue.is_valid(memory.as_ref()), "queue {index} is valid");
            let doorbell = EventFd::new(EFD_NONBLOCK).expect("eventfd");
            doorbells.push(doorbell.try_clone().expect("eventfd"));
            active.push(Some(ActiveQueue {
                index,
                queue,
                doorbell,
            }));
        }
        device
            .activate(Activation {
                memory: memory.clone(),
                queues: active,
                interrupt: interrupt.clone(),
                features,
                workers: Arc::new(ThreadWorkers),
            })
            .expect("the device starts");
        Running {
            device,
            doorbells,
            interrupt,
        }
    }

    /// Notifies the device of queue `index`.
    pub fn ring(&mut self, index: u16) {
        if self.device.waits_on_doorbells() {
            self.doorbells[usize::from(index)].write(1).expect("rings");
        } else {
            self.device.notified(index);
        }
    }

    /// Deactivates the device; returns it, and its queues by index with their positions.
    pub fn stop(mut self) -> (D, Vec<Queue>) {
        let mut queues = self.device.deactivate();
        queues.sort_by_key(|queue| queue.index);
        let queues = queues.into_iter().map(|active| active.queue).collect();
        (self.device, queues)
    }
}
