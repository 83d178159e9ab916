//! The disk as a vhost-user backend.

use jiffy_devices::GuestMemory;
use jiffy_devices::virtio::block::{Backend, Executor, Outcome};
use jiffy_devices::virtio::queue::Chain;
use jiffy_devices::virtio::queue::signal::driver_wants_interrupt;
use jiffy_devices::write_log::WriteLog;
use jiffy_sys::mutex::lock;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost_user_backend::{VhostUserBackend, VringMutex, VringState, VringT};
use virtio_bindings::virtio_blk::{VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_MQ};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_queue::{QueueOwnedT, QueueT};
use vm_memory::{GuestAddressSpace, GuestMemoryAtomic};
use vmm_sys_util::epoll::EventSet;

/// Guest memory as shared by the monitor, which adds and removes regions.
pub type SharedMemory = GuestMemoryAtomic<GuestMemory>;

/// Largest queue a monitor may ask for.
const QUEUE_SIZE: usize = 1024;
/// Offset of `num_queues` in the configuration space (Virtio 1.3 §5.2.4).
const NUM_QUEUES: u32 = 34;
/// Most bytes of configuration that may be read (vhost-user.rst).
const MAX_CONFIG: u32 = 256;

/// A disk for one monitor. Each queue has a thread and an executor.
pub struct Disk {
    backend: Arc<Backend>,
    memory: SharedMemory,
    executors: Vec<Mutex<Executor>>,
    greeted: Arc<AtomicBool>,
}

impl Disk {
    /// Creates a disk with this number of queues.
    pub fn new(backend: Arc<Backend>, queues: u16, memory: SharedMemory) -> Disk {
        let executor = |_| Mutex::new(executor(&backend, true));
        Disk {
            executors: (0..queues).map(executor).collect(),
            backend,
            memory,
            greeted: Arc::default(),
        }
    }

    /// Becomes true when the monitor has asked for the features, which is its first request.
    pub fn greeted(&self) -> Arc<AtomicBool> {
        self.greeted.clone()
    }

    /// Answers all requests in a queue.
    fn serve(&self, vring: &VringMutex<SharedMemory>, thread: usize) -> io::Result<()> {
        let Some(executor) = self.executors.get(thread) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let mut executor = lock(executor);
        let memory = self.memory.memory();
        let memory: &GuestMemory = &memory;
        let mut vring = vring.get_mut();
        let mut promised = false;
        loop {
            let queue = vring.get_queue_mut();
            queue.disable_notification(memory).map_err(invalid_queue)?;
            let answered = answer_all(&mut executor, &mut vring, memory)?;
            if promised && answered == 0 {
                // For example, because the used ring overlaps the available ring.
                let why = "the queue announces requests and has none";
                return Err(io::Error::new(io::ErrorKind::InvalidData, why));
            }
            promised = vring
                .get_queue_mut()
                .enable_notification(memory)
                .map_err(invalid_queue)?;
            if !promised {
                return Ok(());
            }
        }
    }
}

/// Answers requests, and returns how many.
fn answer_all(
    executor: &mut Executor,
    vring: &mut VringState<SharedMemory>,
    memory: &GuestMemory,
) -> io::Result<u64> {
    let mut answered = 0;
    while let Some(chain) = vring
        .get_queue_mut()
        .iter(memory)
        .map_err(invalid_queue)?
        .next()
    {
        let head = chain.head_index();
        let chain = Chain::of(vring.get_queue(), &chain);
        let Outcome::Done(written) = executor.answer(memory, chain, &mut |_| Ok(())) else {
            return Ok(answered);
        };
        answered += 1;
        let queue = vring.get_queue_mut();
        queue
            .add_used(memory, head, written)
            .map_err(invalid_queue)?;
        if driver_wants_interrupt(queue, memory) {
            vring.signal_used_queue()?;
        }
    }
    Ok(answered)
}

fn invalid_queue(error: virtio_queue::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

fn executor(backend: &Backend, write_through: bool) -> Executor {
    // The executor is never stopped before the process ends.
    backend.executor(Arc::new(AtomicBool::new(false)), write_through)
}

impl VhostUserBackend for Disk {
    type Bitmap = WriteLog;
    type Vring = VringMutex<SharedMemory>;

    fn num_queues(&self) -> usize {
        self.executors.len()
    }

    fn max_queue_size(&self) -> usize {
        QUEUE_SIZE
    }

    fn features(&self) -> u64 {
        self.greeted.store(true, Ordering::Release);
        self.backend.features()
            | 1 << VIRTIO_F_VERSION_1
            | 1 << VIRTIO_BLK_F_MQ
            | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
    }

    fn acked_features(&self, features: u64) {
        let write_through = features & 1 << VIRTIO_BLK_F_FLUSH == 0;
        for slot in &self.executors {
            let mut slot = lock(slot);
            *slot = executor(&self.backend, write_through);
        }
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        self.greeted.store(true, Ordering::Release);
        VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
    }

    fn set_event_idx(&self, _enabled: bool) {}

    fn get_config(&self, offset: u32, size: u32) -> Vec<u8> {
        let mut bytes = vec![0; size.min(MAX_CONFIG) as usize];
        self.backend.read_config(u64::from(offset), &mut bytes);
        for (place, value) in (NUM_QUEUES..).zip((self.executors.len() as u16).to_le_bytes()) {
            let index = place.checked_sub(offset).map(|index| index as usize);
            if let Some(byte) = index.and_then(|index| bytes.get_mut(index)) {
                *byte = value;
            }
        }
        bytes
    }

    fn update_memory(&self, _memory: SharedMemory) -> io::Result<()> {
        // The memory is the one that was passed to `new`, which is updated in place.
        Ok(())
    }

    fn queues_per_thread(&self) -> Vec<u64> {
        (0..self.executors.len()).map(|queue| 1 << queue).collect()
    }

    fn handle_event(
        &self,
        _event: u16,
        events: EventSet,
        vrings: &[VringMutex<SharedMemory>],
        thread: usize,
    ) -> io::Result<()> {
        let [vring] = vrings else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        match events.contains(EventSet::IN) {
            true => self.serve(vring, thread),
            false => Ok(()),
        }
    }
}
