//! The virtio device: its life, its target.

use super::account::{Account, BalloonArgs};
use super::config::{ConfigSpace, FEATURES};
use super::queues::Queues;
use super::state::{BalloonState, RestoreError};
use super::statistics::StatisticsBoard;
use super::{PAGE, PAGES_PER_MIB, QUEUE_SIZES};
use crate::virtio::device::{ActivateError, Activation, ActiveQueue, VirtioDevice};
use std::sync::Arc;
use thiserror::Error;
use virtio_bindings::virtio_ids::VIRTIO_ID_BALLOON;

/// A target that can't be reached.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("a balloon cannot hold {target_mib} MiB of a VM that has {ram_mib} MiB")]
pub struct TargetError {
    /// What was asked for.
    pub target_mib: u32,
    /// What there is.
    pub ram_mib: u64,
}

/// The balloon.
pub struct Balloon {
    config: ConfigSpace,
    account: Account,
    /// The target changed, and the driver has not been told.
    untold: bool,
    running: Option<Queues>,
}

impl Balloon {
    /// An empty balloon that is to stay so.
    pub fn new(args: BalloonArgs) -> Balloon {
        Balloon {
            config: ConfigSpace::default(),
            account: Account::new(args),
            untold: false,
            running: None,
        }
    }

    /// A balloon as it was saved.
    pub fn restore(args: BalloonArgs, state: &BalloonState) -> Result<Balloon, RestoreError> {
        state.check(&args)?;
        let mut balloon = Balloon::new(args);
        balloon.config = ConfigSpace {
            target_pages: state.target_pages,
            actual_pages: state.actual_pages,
            poison: state.poison,
        };
        balloon.untold = state.untold;
        Ok(balloon)
    }

    /// The device's state.
    pub fn save(&self) -> BalloonState {
        BalloonState {
            target_pages: self.config.target_pages,
            actual_pages: self.config.actual_pages,
            poison: self.config.poison,
            untold: self.untold,
        }
    }

    /// Says how many MiB the balloon shall hold, and tells the driver: at
    /// once, or when it runs again. Saying the same again makes a driver that
    /// had to take pages back try once more.
    pub fn set_target(&mut self, target_mib: u32) -> Result<(), TargetError> {
        let pages = u64::from(target_mib) * u64::from(PAGES_PER_MIB);
        let fits = pages * PAGE <= self.account.ram_bytes;
        let Some(pages) = u32::try_from(pages).ok().filter(|_| fits) else {
            return Err(TargetError {
                target_mib,
                ram_mib: self.account.ram_bytes >> 20,
            });
        };
        self.config.target_pages = pages;
        self.untold = true;
        self.tell();
        Ok(())
    }

    fn tell(&mut self) {
        if self.untold
            && let Some(queues) = &self.running
        {
            queues.interrupt().config_changed();
            self.untold = false;
        }
    }

    /// MiB that the balloon shall hold.
    pub fn target_mib(&self) -> u32 {
        self.config.target_pages / PAGES_PER_MIB
    }

    /// MiB that the balloon holds, says the guest.
    pub fn actual_mib(&self) -> u32 {
        self.config.actual_pages / PAGES_PER_MIB
    }

    /// The guest says that the balloon holds what it shall, or more.
    pub fn is_full(&self) -> bool {
        self.config.actual_pages >= self.config.target_pages
    }

    /// Bytes given back by inflating, ever since the device was made. A page
    /// that comes and goes counts each time.
    pub fn inflated_bytes(&self) -> u64 {
        self.account.inflated_bytes
    }

    /// Bytes given back by free page reporting, counted likewise.
    pub fn reported_bytes(&self) -> u64 {
        self.account.reported_bytes
    }

    /// Asks the guest for new statistics, which appear on the
    /// [`statistics`](Balloon::statistics) board. False if none will come:
    /// there is no driver, or it gives none.
    pub fn request_statistics(&mut self) -> bool {
        self.running
            .as_mut()
            .is_some_and(Queues::request_statistics)
    }

    /// What the guest said of its memory, and where to wait for more.
    pub fn statistics(&self) -> &Arc<StatisticsBoard> {
        &self.account.statistics
    }
}

impl VirtioDevice for Balloon {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_BALLOON
    }

    fn queue_max_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn features(&self) -> u64 {
        FEATURES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        self.config.read(offset, data);
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        self.config.write(offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let queues = self.running.insert(Queues::new(activation)?);
        queues.serve_all(&mut self.account, self.config.poison);
        self.tell();
        Ok(())
    }

    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        self.running
            .take()
            .map(Queues::into_active)
            .unwrap_or_default()
    }

    fn reset(&mut self) {
        self.config.actual_pages = 0;
        self.config.poison = 0;
        self.account.statistics.clear();
    }

    fn waits_on_doorbells(&self) -> bool {
        false
    }

    fn notified(&mut self, queue: u16) {
        if let Some(queues) = &mut self.running {
            queues.serve(queue, &mut self.account, self.config.poison);
        }
    }
}
