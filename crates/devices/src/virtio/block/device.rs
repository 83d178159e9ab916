//! The block device and its queue.

use super::QUEUE_SIZE;
use super::backend::Backend;
use super::options::{BlockError, BlockOptions};
use super::residency::Residency;
use super::state::{BlockState, RestoreError};
use super::worker::Worker;
use crate::virtio::device::{ActivateError, Activation, ActiveQueue, VirtioDevice, WorkerRole};
use crate::virtio::queue::limit::{Limiter, RateLimit};
use crate::virtio::work::Work;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use virtio_bindings::virtio_blk::VIRTIO_BLK_F_FLUSH;
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;

/// A disk. Its file stays open and locked as long as the device exists.
#[derive(Debug)]
pub struct Block {
    backend: Backend,
    /// Outlives the worker, so that a pause does not refill the buckets.
    limiter: Arc<Limiter>,
    running: Option<Work<ActiveQueue>>,
}

impl Block {
    /// Opens a disk.
    ///
    /// # Errors
    ///
    /// As for [`Backend::open`].
    pub fn open(options: &BlockOptions) -> Result<Block, BlockError> {
        Ok(Block {
            backend: Backend::open(options)?,
            limiter: Arc::new(Limiter::new(options.limit)),
            running: None,
        })
    }

    /// Opens the disk of a saved device. Its properties must be those that the guest knows.
    ///
    /// # Errors
    ///
    /// As for [`Backend::open`], and [`RestoreError::Changed`] if a property differs.
    pub fn restore(options: &BlockOptions, state: &BlockState) -> Result<Block, RestoreError> {
        let block = Block::open(options)?;
        state.compare(&options.path, &block.save())?;
        Ok(block)
    }

    /// Marks parts of the disk's file as missing; `residency` knows which. Must be called before
    /// activation.
    pub fn on_demand(mut self, residency: Arc<dyn Residency>) -> Block {
        self.backend.set_residency(residency);
        self
    }

    /// Replaces the limit, also of a request that waits.
    pub fn set_limit(&self, limit: RateLimit) {
        self.limiter.set(limit);
        if let Some(running) = &self.running
            && let Err(error) = running.notify()
        {
            tracing::error!(%error, "a disk's worker could not be notified of its new limit, which applies from the next request");
        }
    }

    /// The device's state.
    pub fn save(&self) -> BlockState {
        self.backend.state()
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
        self.backend.features()
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        self.backend.read_config(offset, data);
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
        let write_through = activation.features & (1 << VIRTIO_BLK_F_FLUSH) == 0;
        let executor = self.backend.executor(stop.clone(), write_through);
        let disk = self.backend.disk();
        let role = match disk.on_demand() {
            Some(_) => WorkerRole::BlockOnDemand,
            None => WorkerRole::Block,
        };
        let worker = Worker {
            executor,
            disk,
            waiting: Vec::new(),
            limiter: self.limiter.clone(),
            memory: activation.memory,
            interrupt: activation.interrupt,
            active,
            stop: stop.clone(),
            log: self.backend.log(),
        };
        let work = Work::start(
            "disk",
            &*activation.workers,
            (role, "block"),
            (stop, doorbell),
            || worker.run(),
        );
        self.running = Some(work.map_err(ActivateError::Worker)?);
        Ok(())
    }

    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        let Some(running) = self.running.take() else {
            return Vec::new();
        };
        running.stop();
        running.join().into_iter().collect()
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.deactivate();
    }
}
