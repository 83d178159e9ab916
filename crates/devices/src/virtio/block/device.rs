//! The virtio device: its life and its one queue.

use super::QUEUE_SIZE;
use super::config::{ConfigSpace, features};
use super::disk::Disk;
use super::options::{BlockError, BlockOptions, ID_BYTES};
use super::state::{BlockState, RestoreError};
use super::worker::{Worker, WorkerParts};
use crate::log_limit::LogLimit;
use crate::virtio::device::{ActivateError, Activation, ActiveQueue, VirtioDevice, WorkerRole};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use virtio_bindings::virtio_blk::VIRTIO_BLK_F_FLUSH;
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;
use vmm_sys_util::eventfd::EventFd;

/// A disk. Its file stays open and locked as long as the device lives.
#[derive(Debug)]
pub struct Block {
    disk: Arc<Disk>,
    id: [u8; ID_BYTES],
    config: ConfigSpace,
    log: Arc<LogLimit>,
    running: Option<Running>,
}

/// A worker thread and the means to end it.
#[derive(Debug)]
struct Running {
    stop: Arc<AtomicBool>,
    doorbell: EventFd,
    thread: JoinHandle<()>,
    returned: Arc<Mutex<Option<ActiveQueue>>>,
}

impl Block {
    /// Opens a disk.
    pub fn open(options: &BlockOptions) -> Result<Block, BlockError> {
        let id = options.id.as_bytes();
        let mut padded = [0; ID_BYTES];
        padded
            .get_mut(..id.len())
            .ok_or_else(|| BlockError::Id(options.id.clone()))?
            .copy_from_slice(id);
        let disk = Disk::open(options)?;
        Ok(Block {
            config: ConfigSpace::new(&disk),
            disk: Arc::new(disk),
            id: padded,
            log: Arc::default(),
            running: None,
        })
    }

    /// Opens the disk of a saved device; it must look to the guest as it did.
    pub fn restore(options: &BlockOptions, state: &BlockState) -> Result<Block, RestoreError> {
        let block = Block::open(options)?;
        state.compare(&options.path, &block.save())?;
        Ok(block)
    }

    /// The device's state.
    pub fn save(&self) -> BlockState {
        BlockState {
            bytes: self.disk.bytes(),
            read_only: self.disk.read_only(),
            block_size: self.disk.block_size(),
            id: self.id,
        }
    }
}

impl VirtioDevice for Block {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_BLOCK
    }

    fn queue_max_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE]
    }

    fn features(&self) -> u64 {
        features(&self.disk)
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        self.config.read(offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let active = activation
            .queues
            .into_iter()
            .next()
            .flatten()
            .ok_or(ActivateError::MissingQueue(0))?;
        let doorbell = active.doorbell.try_clone().map_err(ActivateError::Worker)?;
        let stop = Arc::new(AtomicBool::new(false));
        let returned = Arc::new(Mutex::new(None));
        let worker = Worker::new(WorkerParts {
            disk: self.disk.clone(),
            id: self.id,
            memory: activation.memory,
            interrupt: activation.interrupt,
            active,
            stop: stop.clone(),
            log: self.log.clone(),
            write_through: activation.features & (1 << VIRTIO_BLK_F_FLUSH) == 0,
        });
        let slot = returned.clone();
        let body = move || {
            let queue = worker.run();
            *slot.lock().expect("the slot of a disk's queue") = Some(queue);
        };
        let thread = activation
            .workers
            .spawn(WorkerRole::Block, "block", Box::new(body))
            .map_err(ActivateError::Worker)?;
        self.running = Some(Running {
            stop,
            doorbell,
            thread,
            returned,
        });
        Ok(())
    }

    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        let Some(running) = self.running.take() else {
            return Vec::new();
        };
        running.stop.store(true, Ordering::SeqCst);
        if let Err(error) = running.doorbell.write(1) {
            tracing::error!(%error, "the doorbell of a disk can't be rung");
        }
        if running.thread.join().is_err() {
            tracing::error!("the thread of a disk ended badly");
        }
        let mut returned = match running.returned.lock() {
            Ok(slot) => slot,
            Err(poisoned) => poisoned.into_inner(),
        };
        returned.take().into_iter().collect()
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.deactivate();
    }
}
