//! The memory balloons.

use super::Devices;
use super::error::DeviceError;
use super::virtio::{Virtio, VirtioKind};
use super::wiring::Wiring;
use crate::sections::Section;
use jiffy_devices::virtio::balloon::{
    Balloon, BalloonArgs, BalloonState, TargetError, WithholdingState,
};
use jiffy_sys::mutex::lock;
use jiffy_wire::vmm::{BalloonStatus, MemoryStatus, VmmConfig};

/// Memory given back to the host.
#[derive(Debug)]
pub struct BalloonKind;

impl VirtioKind for BalloonKind {
    type Device = Balloon;
    type State = BalloonState;
    const SECTION: Section = Section::new("balloon", 1);
    const NAME: &'static str = "a balloon";

    fn count(config: &VmmConfig) -> usize {
        config.balloon.into()
    }

    fn create(
        wiring: &Wiring<'_>,
        _number: usize,
        state: Option<&BalloonState>,
    ) -> Result<Balloon, DeviceError> {
        let args = args(wiring);
        Ok(match state {
            None => Balloon::new(args),
            Some(state) => Balloon::restore(args, state)?,
        })
    }

    fn save(device: &mut Balloon) -> Result<BalloonState, DeviceError> {
        Ok(device.save())
    }
}

/// The balloon that withholds what is above the memory that a guest may use for now.
#[derive(Debug)]
pub struct WithholdingKind;

impl VirtioKind for WithholdingKind {
    type Device = Balloon;
    type State = WithholdingState;
    const SECTION: Section = Section::new("withheld", 1);
    const NAME: &'static str = "withheld memory";

    fn count(config: &VmmConfig) -> usize {
        config.usable_memory_mib.is_some().into()
    }

    fn create(
        wiring: &Wiring<'_>,
        _number: usize,
        state: Option<&WithholdingState>,
    ) -> Result<Balloon, DeviceError> {
        let args = args(wiring);
        let config = wiring.args.config;
        let usable = config.usable_memory_mib.unwrap_or(config.memory.size_mib);
        Ok(match state {
            None => Balloon::withholding(args, config.memory.size_mib.saturating_sub(usable))?,
            Some(state) => Balloon::restore_withholding(args, state)?,
        })
    }

    fn save(device: &mut Balloon) -> Result<WithholdingState, DeviceError> {
        Ok(device.save_withholding())
    }
}

fn args(wiring: &Wiring<'_>) -> BalloonArgs {
    BalloonArgs {
        ram_bytes: wiring.args.ram.size(),
        reclaim: wiring.args.ram.clone(),
    }
}

impl Devices {
    /// Sets the RAM that the guest may use, MiB; `None` if it may always use all of it.
    ///
    /// # Errors
    ///
    /// As for [`Balloon::set_target`].
    pub fn set_usable_memory(&self, usable_mib: u32) -> Option<Result<(), TargetError>> {
        let mut transport = lock(self.first::<Virtio<WithholdingKind>>()?);
        let balloon = transport.device_mut();
        Some(balloon.set_target(balloon.ram_mib().saturating_sub(usable_mib)))
    }

    /// The RAM that the guest may use, and what it has; `None` if it may always use all of it.
    pub fn usable_memory(&self) -> Option<MemoryStatus> {
        let transport = lock(self.first::<Virtio<WithholdingKind>>()?);
        let balloon = transport.device();
        Some(MemoryStatus {
            usable_mib: balloon.ram_mib().saturating_sub(balloon.target_mib()),
            used_mib: balloon.ram_mib().saturating_sub(balloon.given_mib()),
        })
    }

    /// Sets the balloon's target size in MiB; `None` if there is no balloon.
    ///
    /// # Errors
    ///
    /// As for [`Balloon::set_target`].
    pub fn set_balloon(&self, target_mib: u32) -> Option<Result<(), TargetError>> {
        let balloon = self.first::<Virtio<BalloonKind>>()?;
        Some(lock(balloon).device_mut().set_target(target_mib))
    }

    /// The balloon's size and the newest statistics of the guest; requests newer ones.
    pub fn balloon(&self) -> Option<BalloonStatus> {
        let mut balloon = lock(self.first::<Virtio<BalloonKind>>()?);
        let balloon = balloon.device_mut();
        balloon.request_statistics();
        let stats = balloon.statistics().latest().by_name();
        Some(BalloonStatus {
            target_mib: balloon.target_mib(),
            actual_mib: balloon.actual_mib(),
            reported_bytes: balloon.reported_bytes(),
            stats: stats
                .into_iter()
                .map(|(name, value)| (name.to_owned(), value))
                .collect(),
        })
    }
}
