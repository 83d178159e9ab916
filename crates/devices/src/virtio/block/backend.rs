//! A disk without a transport: its properties, and executors for its requests.

use super::config::{ConfigSpace, features};
use super::disk::Disk;
use super::executor::Executor;
use super::options::{BlockError, BlockOptions, ID_BYTES};
use super::residency::Residency;
use super::state::BlockState;
use jiffy_sys::log_limit::LogLimit;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// A disk, open and locked while this value exists.
#[derive(Debug)]
pub struct Backend {
    disk: Arc<Disk>,
    id: [u8; ID_BYTES],
    config: ConfigSpace,
    log: Arc<LogLimit>,
}

impl Backend {
    /// Opens a disk.
    ///
    /// # Errors
    ///
    /// If the serial number is too long, if the file can't be opened as the options ask for, is
    /// neither a regular file nor a block device, or is in use, or if its length is 0 or not a
    /// whole number of blocks ([`BlockError`]).
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

    /// Marks parts of the disk's file as missing. Must be called before the disk is used.
    ///
    /// # Panics
    ///
    /// If there is an executor of it.
    pub fn set_residency(&mut self, residency: Arc<dyn Residency>) {
        Arc::get_mut(&mut self.disk)
            .expect("nobody uses the disk yet")
            .set_residency(residency);
    }

    /// The disk that its worker shares with other users.
    pub(super) fn disk(&self) -> Arc<Disk> {
        self.disk.clone()
    }

    /// Feature bits that a driver may accept, without the transport's.
    pub fn features(&self) -> u64 {
        features(&self.disk)
    }

    /// Reads the configuration space (Virtio 1.3 §5.2.4); bytes past its end
    /// read as zero.
    pub fn read_config(&self, offset: u64, data: &mut [u8]) {
        self.config.read(offset, data);
    }

    /// The properties that the driver knows.
    pub fn state(&self) -> BlockState {
        BlockState {
            bytes: self.disk.bytes(),
            read_only: self.disk.read_only(),
            block_size: self.disk.block_size(),
            id: self.id,
        }
    }

    /// An executor of requests for one thread, until `stop` is set. With `write_through`, for
    /// drivers that don't flush, each write is durable when it is answered.
    pub fn executor(&self, stop: Arc<AtomicBool>, write_through: bool) -> Executor {
        let (disk, log) = (self.disk.clone(), self.log.clone());
        Executor::new(disk, self.id, log, stop, write_through)
    }

    pub(super) fn log(&self) -> Arc<LogLimit> {
        self.log.clone()
    }
}
