//! The entropy device.

use super::error::DeviceError;
use super::virtio::VirtioKind;
use super::wiring::Wiring;
use crate::sections::Section;
use jiffy_devices::virtio::entropy::{Entropy, EntropyState};
use jiffy_wire::vmm::VmmConfig;

/// Random numbers for the guest.
#[derive(Debug)]
pub struct EntropyKind;

impl VirtioKind for EntropyKind {
    type Device = Entropy;
    type State = EntropyState;
    const SECTION: Section = Section::new("entropy", 1);
    const NAME: &'static str = "an entropy device";

    fn count(config: &VmmConfig) -> usize {
        config.rng.into()
    }

    fn create(
        _wiring: &Wiring<'_>,
        _number: usize,
        state: Option<&EntropyState>,
    ) -> Result<Entropy, DeviceError> {
        Ok(match state {
            None => Entropy::new(),
            Some(state) => Entropy::restore(state),
        })
    }

    fn save(device: &mut Entropy) -> Result<EntropyState, DeviceError> {
        Ok(device.save())
    }
}
