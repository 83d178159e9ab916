//! The interface between a virtio device, its transport, and the VMM that owns the threads.

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
/// Life cycle: created → [`activate`](VirtioDevice::activate) when the driver sets DRIVER_OK →
/// [`deactivate`](VirtioDevice::deactivate) when the driver resets it or the VM pauses → possibly
/// `activate` again. Calls are never concurrent.
pub trait VirtioDevice: Send {
    /// Device type (Virtio 1.3 §5): 1 network, 2 block, 4 entropy, 5 balloon, 19 socket,
    /// 26 file system.
    fn device_type(&self) -> u32;

    /// Largest size of each queue, a power of two; one entry per queue.
    fn queue_max_sizes(&self) -> &[u16];

    /// The offered feature bits. The transport adds VERSION_1; others, such as EVENT_IDX, are the
    /// device's to offer.
    fn features(&self) -> u64;

    /// Reads the configuration space; bytes past its end are zeros.
    fn read_config(&self, offset: u64, data: &mut [u8]);

    /// Writes the configuration space; most devices have no writable fields.
    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}

    /// Starts work. The transport has checked every queue that it passes (`Queue::is_valid`), and
    /// that the driver accepted a subset of the offered features.
    ///
    /// The device checks its queues once without waiting for a doorbell, because requests may have
    /// been waiting when the VM was paused or saved.
    ///
    /// # Errors
    ///
    /// If the driver did not enable a queue that the device needs, if a queue is not valid, or if a
    /// thread or a descriptor can't be created.
    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError>;

    /// Stops work: returns after the device's jobs have ended and no request is in progress. The
    /// queues are returned with their positions, for a later `activate` (pause, snapshot) or to be
    /// dropped (reset).
    fn deactivate(&mut self) -> Vec<ActiveQueue>;

    /// The driver has reset the device, which is not running: discard what the driver has
    /// configured. Not called for a pause.
    fn reset(&mut self) {}

    /// Whether a thread of the device waits on the doorbells. If not, the VMM registers no
    /// ioeventfd for it: every QueueNotify exits to the transport, which calls
    /// [`notified`](VirtioDevice::notified).
    fn waits_on_doorbells(&self) -> bool {
        true
    }

    /// The driver notified `queue`. Only called while active, on a device that does not wait on
    /// doorbells, on the thread of the notifying vCPU: do a small, bounded amount of work.
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

/// The queues, memory and callbacks that a device gets when it is activated.
pub struct Activation {
    /// Guest RAM.
    pub memory: Arc<GuestMemory>,
    /// The queues that the driver enabled, by index; `None` for a disabled one.
    pub queues: Vec<Option<ActiveQueue>>,
    /// Interrupts the driver.
    pub interrupt: Arc<dyn Interrupt>,
    /// Features the driver accepted.
    pub features: u64,
    /// Starts threads.
    pub workers: Arc<dyn Workers>,
}

/// An active queue and its doorbell: the event descriptor that the driver's notification makes
/// readable.
#[derive(Debug)]
pub struct ActiveQueue {
    /// The queue's index.
    pub index: u16,
    /// The rings and the device's positions in them.
    pub queue: Queue,
    /// Readable after the driver wrote QueueNotify (an ioeventfd).
    pub doorbell: EventFd,
}

/// How a device interrupts the guest (Virtio 1.3 §4.2.2, InterruptStatus).
pub trait Interrupt: Send + Sync {
    /// Reports used buffers of any queue.
    fn used_buffers(&self);
    /// Reports a change of the configuration space.
    fn config_changed(&self);
    /// Reports that the driver violated a rule or the device can't continue, so that only a reset
    /// helps (DEVICE_NEEDS_RESET, Virtio 1.3 §2.1.1).
    fn needs_reset(&self) {
        self.config_changed();
    }
}

/// The role of a device's thread, by which the VMM chooses its seccomp filter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WorkerRole {
    /// Reads and writes disk files.
    Block,
    /// Reads a disk file, and requests its missing parts.
    BlockOnDemand,
    /// Moves bytes between vsock and Unix sockets.
    Vsock,
    /// Moves frames between a TAP interface or a socket and the guest.
    Net,
    /// Moves messages between the guest and the server of a shared folder.
    Fs,
}

impl WorkerRole {
    /// All roles.
    pub const ALL: [WorkerRole; 5] = [
        WorkerRole::Block,
        WorkerRole::BlockOnDemand,
        WorkerRole::Vsock,
        WorkerRole::Net,
        WorkerRole::Fs,
    ];
}

/// Runs work on threads, each in the sandbox of its role.
pub trait Workers: Send + Sync {
    /// Runs `body` on a thread of that role.
    ///
    /// # Errors
    ///
    /// If a thread can't be started.
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

    /// Waits for its end.
    ///
    /// # Errors
    ///
    /// If the work panicked.
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

/// Why a device could not start work; the transport sets DEVICE_NEEDS_RESET.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ActivateError {
    /// The driver did not enable a necessary queue.
    #[error("queue {0} is needed but was not enabled by the driver")]
    MissingQueue(u16),
    /// The rings of a queue are misaligned, have a wrong size or are outside guest RAM.
    #[error("queue {0} lies outside guest memory or is malformed")]
    InvalidQueue(u16),
    /// A thread, event descriptor or poll set could not be created.
    #[error("the device's worker could not start")]
    Worker(#[source] io::Error),
}
