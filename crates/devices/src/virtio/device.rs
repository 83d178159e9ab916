//! The contract between a virtio device, the transport in front of it, and
//! the VMM that owns the threads.

use crate::GuestMemory;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use thiserror::Error;
use virtio_queue::Queue;
use vmm_sys_util::eventfd::EventFd;

/// A virtio device behind a transport.
///
/// Life: made → [`activate`](VirtioDevice::activate) when the driver sets
/// DRIVER_OK → [`deactivate`](VirtioDevice::deactivate) when the driver resets
/// it or the VM pauses → perhaps `activate` again. All calls come from one
/// thread at a time.
pub trait VirtioDevice: Send {
    /// Device type (Virtio 1.3 §5): 1 network, 2 block, 4 entropy, 5 balloon, 19 socket.
    fn device_type(&self) -> u32;

    /// Largest size of each queue, a power of two; one entry a queue.
    fn queue_max_sizes(&self) -> &[u16];

    /// Feature bits offered, without the transport's (VERSION_1, EVENT_IDX …
    /// are the device's own to offer; VERSION_1 is added by the transport).
    fn features(&self) -> u64;

    /// Reads device configuration; bytes past its end read as zero.
    fn read_config(&self, offset: u64, data: &mut [u8]);

    /// Writes device configuration; most devices have nothing writable.
    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}

    /// Starts work. The transport has checked every queue it hands over
    /// (`Queue::is_valid`) and that the driver accepted a subset of the
    /// offered features.
    ///
    /// A device looks at its queues once without waiting for a doorbell:
    /// requests may have been waiting when the VM was paused or saved.
    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError>;

    /// Stops work: returns after the device's jobs ended and no request is
    /// being touched. The queues come back with their positions, for a later
    /// `activate` (pause, snapshot) or to be dropped (reset).
    fn deactivate(&mut self) -> Vec<ActiveQueue>;

    /// The driver has reset the device, which is not running: forget what the driver had
    /// configured. Not called for a pause.
    fn reset(&mut self) {}

    /// Whether a thread of the device waits on the doorbells. If not, the VMM registers no
    /// ioeventfd for it: every QueueNotify exits to the transport, which calls
    /// [`notified`](VirtioDevice::notified).
    fn waits_on_doorbells(&self) -> bool {
        true
    }

    /// The driver notified `queue`. Only called while active, on a device that
    /// does not wait on doorbells, on the thread of the notifying vCPU: do a
    /// small, bounded amount of work.
    fn notified(&mut self, _queue: u16) {}
}

impl<D: VirtioDevice + ?Sized> VirtioDevice for Box<D> {
    fn device_type(&self) -> u32 {
        (**self).device_type()
    }
    fn queue_max_sizes(&self) -> &[u16] {
        (**self).queue_max_sizes()
    }
    fn features(&self) -> u64 {
        (**self).features()
    }
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        (**self).read_config(offset, data)
    }
    fn write_config(&mut self, offset: u64, data: &[u8]) {
        (**self).write_config(offset, data)
    }
    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        (**self).activate(activation)
    }
    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        (**self).deactivate()
    }
    fn reset(&mut self) {
        (**self).reset()
    }
    fn waits_on_doorbells(&self) -> bool {
        (**self).waits_on_doorbells()
    }
    fn notified(&mut self, queue: u16) {
        (**self).notified(queue)
    }
}

/// What a device gets when it is activated.
pub struct Activation {
    /// Guest RAM.
    pub memory: Arc<GuestMemory>,
    /// The queues the driver enabled, by index; a queue the driver left
    /// disabled is `None`.
    pub queues: Vec<Option<ActiveQueue>>,
    /// Interrupts the driver.
    pub interrupt: Arc<dyn Interrupt>,
    /// Features the driver accepted.
    pub features: u64,
    /// Starts threads.
    pub workers: Arc<dyn Workers>,
}

/// A queue in use and its doorbell: the event descriptor that the driver's notification
/// makes readable.
#[derive(Debug)]
pub struct ActiveQueue {
    /// The queue's index.
    pub index: u16,
    /// Rings and positions.
    pub queue: Queue,
    /// Readable after the driver wrote QueueNotify (an ioeventfd).
    pub doorbell: EventFd,
}

/// How a device interrupts the guest (Virtio 1.3 §4.2.2, InterruptStatus).
pub trait Interrupt: Send + Sync {
    /// Used buffers were returned on some queue.
    fn used_buffers(&self);
    /// The device configuration changed.
    fn config_changed(&self);
    /// The driver broke the rules or the device cannot go on: only a reset
    /// helps (DEVICE_NEEDS_RESET, Virtio 1.3 §2.1.1).
    fn needs_reset(&self) {
        self.config_changed();
    }
}

/// What a device's thread does: the VMM chooses its seccomp filter by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WorkerRole {
    /// Reads and writes disk files.
    Block,
    /// Reads a disk file, and asks for what is missing of it.
    BlockOnDemand,
    /// Moves bytes between vsock and Unix sockets.
    Vsock,
    /// Moves frames between a TAP interface or a socket and the guest.
    Net,
}

impl WorkerRole {
    /// All roles.
    pub const ALL: [WorkerRole; 4] = [
        WorkerRole::Block,
        WorkerRole::BlockOnDemand,
        WorkerRole::Vsock,
        WorkerRole::Net,
    ];
}

/// Runs work on threads, each in the sandbox of its role.
pub trait Workers: Send + Sync {
    /// Runs `body` on a thread of that role.
    ///
    /// # Errors
    ///
    /// A thread can't be started.
    fn spawn(
        &self,
        role: WorkerRole,
        name: &str,
        body: Box<dyn FnOnce() + Send>,
    ) -> io::Result<Job>;
}

/// Work that runs on a thread. The thread may do other work later.
pub struct Job(Box<dyn FnOnce() -> thread::Result<()> + Send>);

impl Job {
    /// `wait` returns when the work has ended: an error if it panicked.
    pub fn new(wait: impl FnOnce() -> thread::Result<()> + Send + 'static) -> Job {
        Job(Box::new(wait))
    }

    /// Waits for its end; an error if it panicked.
    pub fn join(self) -> thread::Result<()> {
        (self.0)()
    }
}

impl From<JoinHandle<()>> for Job {
    fn from(thread: JoinHandle<()>) -> Job {
        Job::new(move || thread.join())
    }
}

impl fmt::Debug for Job {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Job")
    }
}

/// A device could not start work; the transport sets DEVICE_NEEDS_RESET.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ActivateError {
    /// The driver enabled too few queues.
    #[error("queue {0} is needed but was not enabled by the driver")]
    MissingQueue(u16),
    /// The rings of a queue are misaligned, of a wrong size or not in guest RAM.
    #[error("queue {0} lies outside guest memory or is malformed")]
    InvalidQueue(u16),
    /// A thread, event descriptor or poll set could not be made.
    #[error("the device's worker could not start")]
    Worker(#[source] io::Error),
}
