//! The balloon's virtio device and its target.

use super::account::{Account, BalloonArgs};
use super::config::{ConfigSpace, FEATURES, WITHHOLDING};
use super::queues::Queues;
use super::state::{BalloonState, RestoreError, WithholdingState};
use super::statistics::StatisticsBoard;
use super::{PAGE, PAGES_PER_MIB, QUEUE_SIZES};
use crate::virtio::device::{ActivateError, Activation, ActiveQueue, VirtioDevice};
use std::sync::Arc;
use thiserror::Error;
use virtio_bindings::virtio_ids::VIRTIO_ID_BALLOON;

/// The target is larger than the guest's RAM.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("a balloon cannot hold {target_mib} MiB of a VM that has {ram_mib} MiB")]
pub struct TargetError {
    /// The wanted target, MiB.
    pub target_mib: u32,
    /// The guest's RAM, MiB.
    pub ram_mib: u64,
}

/// The balloon.
pub struct Balloon {
    features: u64,
    config: ConfigSpace,
    account: Account,
    /// The target has changed, and the driver was not notified yet.
    untold: bool,
    running: Option<Queues>,
}

impl Balloon {
    /// An empty balloon with target 0.
    pub fn new(args: BalloonArgs) -> Balloon {
        Balloon {
            features: FEATURES,
            config: ConfigSpace::default(),
            account: Account::new(args),
            untold: false,
            running: None,
        }
    }

    /// Restores a saved balloon.
    ///
    /// # Errors
    ///
    /// [`RestoreError::Target`] if the saved target is larger than the RAM.
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

    /// An empty balloon with this target, MiB, from which the driver takes nothing back by itself.
    ///
    /// # Errors
    ///
    /// As for [`set_target`](Balloon::set_target).
    pub fn withholding(args: BalloonArgs, target_mib: u32) -> Result<Balloon, TargetError> {
        let mut balloon = Balloon::new(args);
        balloon.features = WITHHOLDING;
        balloon.set_target(target_mib)?;
        Ok(balloon)
    }

    /// Restores a saved balloon that withholds memory.
    ///
    /// # Errors
    ///
    /// As for [`restore`](Balloon::restore), and [`RestoreError::Given`] if the balloon has more
    /// pages than the RAM.
    pub fn restore_withholding(
        args: BalloonArgs,
        state: &WithholdingState,
    ) -> Result<Balloon, RestoreError> {
        let mut balloon = Balloon::restore(args, &state.balloon)?;
        let (given, ram) = (state.given_pages, balloon.account.ram_pages());
        if u64::from(given) > ram {
            return Err(RestoreError::Given { given, ram });
        }
        balloon.features = WITHHOLDING;
        balloon.account.given_pages = given.into();
        Ok(balloon)
    }

    /// The state of a balloon that withholds memory.
    pub fn save_withholding(&self) -> WithholdingState {
        WithholdingState {
            balloon: self.save(),
            given_pages: u32::try_from(self.account.given_pages).unwrap_or(u32::MAX),
        }
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

    /// Sets the balloon's target size, MiB, and notifies the driver: at once, or when it runs
    /// again. Setting the same target again makes a driver that had to take pages back try again.
    ///
    /// # Errors
    ///
    /// If the target is larger than the RAM. The former one stays then.
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
        self.announce_target();
        Ok(())
    }

    fn announce_target(&mut self) {
        if self.untold
            && let Some(queues) = &self.running
        {
            queues.interrupt().config_changed();
            self.untold = false;
        }
    }

    /// The guest's RAM, MiB.
    pub fn ram_mib(&self) -> u32 {
        u32::try_from(self.account.ram_bytes >> 20).unwrap_or(u32::MAX)
    }

    /// The target size, MiB.
    pub fn target_mib(&self) -> u32 {
        self.config.target_pages / PAGES_PER_MIB
    }

    /// The size as the guest reports it, MiB.
    pub fn actual_mib(&self) -> u32 {
        self.config.actual_pages / PAGES_PER_MIB
    }

    /// Memory that the driver gave and has not taken back, MiB, rounded down. Counted are pages
    /// that were released, whatever size the driver reports. A driver that gives a page twice makes
    /// it too large; one that uses pages that it gave gains the same.
    pub fn given_mib(&self) -> u32 {
        let mib = self.account.given_pages / u64::from(PAGES_PER_MIB);
        u32::try_from(mib).unwrap_or(u32::MAX)
    }

    /// Whether the guest reports that the target is reached or exceeded.
    pub fn is_full(&self) -> bool {
        self.config.actual_pages >= self.config.target_pages
    }

    /// Bytes released by inflating since the device was created. A page that is released several
    /// times counts each time.
    pub fn inflated_bytes(&self) -> u64 {
        self.account.inflated_bytes
    }

    /// Bytes released by free page reporting, counted in the same way.
    pub fn reported_bytes(&self) -> u64 {
        self.account.reported_bytes
    }

    /// Requests new statistics from the guest, which appear on the
    /// [`statistics`](Balloon::statistics) board. False if none will come, because there is no
    /// driver or it gives none.
    pub fn request_statistics(&mut self) -> bool {
        self.running
            .as_mut()
            .is_some_and(Queues::request_statistics)
    }

    /// The guest's statistics, and a way to wait for new ones.
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
        self.features
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
        self.announce_target();
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
        self.account.given_pages = 0;
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
