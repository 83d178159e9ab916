//! The memory balloon.

use super::Devices;
use super::error::DeviceError;
use super::virtio::{Virtio, VirtioKind};
use super::wiring::Wiring;
use crate::sections::Section;
use jiffy_devices::virtio::balloon::{Balloon, BalloonArgs, BalloonState, TargetError};
use jiffy_sys::mutex::lock;
use jiffy_wire::vmm::{BalloonStatus, VmmConfig};

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
        let args = BalloonArgs {
            ram_bytes: wiring.args.ram.size(),
            reclaim: wiring.args.ram.clone(),
        };
        Ok(match state {
            None => Balloon::new(args),
            Some(state) => Balloon::restore(args, state)?,
        })
    }

    fn save(device: &Balloon) -> BalloonState {
        device.save()
    }
}

impl Devices {
    /// Sets the balloon's target size in MiB; `None` if there is no balloon.
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
