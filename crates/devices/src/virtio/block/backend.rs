//! A disk without a transport: what it looks like, and what carries out its
//! requests.

use super::config::{ConfigSpace, features};
use super::disk::Disk;
use super::executor::Executor;
use super::options::{BlockError, BlockOptions, ID_BYTES};
use super::residency::Residency;
use super::state::BlockState;
use crate::log_limit::LogLimit;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// A disk, open and locked as long as this lives.
#[derive(Debug)]
pub struct Backend {
    disk: Arc<Disk>,
    id: [u8; ID_BYTES],
    config: ConfigSpace,
    log: Arc<LogLimit>,
}

impl Backend {
    /// Opens a disk.
    pub fn open(options: &BlockOptions) -> Result<Backend, BlockError> {
        let id = options.id.as_bytes();
        let mut padded = [0; ID_BYTES];
        padded
            .get_mut(..id.len())
            .ok_or_else(|| BlockError::Id(options.id.clone()))?
            .copy_from_slice(id);
        let disk = Disk::open(options)?;
        Ok(Backend {
            config: ConfigSpace::new(&disk),
            disk: Arc::new(disk),
            id: padded,
            log: Arc::default(),
        })
    }

    /// Says that parts of the disk's file are missing, before it is used.
    ///
    /// # Panics
    /// If an executor of it exists already.
    pub fn set_residency(&mut self, residency: Arc<dyn Residency>) {
        Arc::get_mut(&mut self.disk)
            .expect("nobody uses the disk yet")
            .set_residency(residency);
    }

    /// What its one worker has in common with its other users.
    pub(super) fn disk(&self) -> Arc<Disk> {
        self.disk.clone()
    }

    /// Feature bits a driver may choose from, without the transport's.
    pub fn features(&self) -> u64 {
        features(&self.disk)
    }

    /// Reads the configuration space (Virtio 1.3 §5.2.4); bytes past its end
    /// read as zero.
    pub fn read_config(&self, offset: u64, data: &mut [u8]) {
        self.config.read(offset, data);
    }

    /// What a driver knows of it.
    pub fn state(&self) -> BlockState {
        BlockState {
            bytes: self.disk.bytes(),
            read_only: self.disk.read_only(),
            block_size: self.disk.block_size(),
            id: self.id,
        }
    }

    /// Carries out requests on one thread, until `stop` is set. With
    /// `write_through`, for drivers that don't flush, each write is durable
    /// when it is answered.
    pub fn executor(&self, stop: Arc<AtomicBool>, write_through: bool) -> Executor {
        let (disk, log) = (self.disk.clone(), self.log.clone());
        Executor::new(disk, self.id, log, stop, write_through)
    }

    pub(super) fn log(&self) -> Arc<LogLimit> {
        self.log.clone()
    }
}
