//! The PC's clock.

use super::error::DeviceError;
use super::kind::DeviceKind;
use super::wiring::Wiring;
use super::{Shared, shared};
use crate::sections::{Count, Section};
use jiffy_devices::rtc::{self, Rtc, RtcState};
use jiffy_sys::mutex::lock;
use jiffy_wire::vmm::VmmConfig;

/// The clock.
#[derive(Debug)]
pub struct RtcKind;

impl DeviceKind for RtcKind {
    type Device = Shared<Rtc>;
    type State = RtcState;
    const SECTION: Section = Section::new("rtc", 1);
    const NAME: &'static str = "a clock";
    const COUNT: Count = Count::One;

    fn count(_config: &VmmConfig) -> usize {
        1
    }

    fn attach(
        wiring: &mut Wiring<'_>,
        _number: usize,
        state: Option<&RtcState>,
    ) -> Result<Shared<Rtc>, DeviceError> {
        let rtc = shared(Rtc::restore(&state.copied().unwrap_or_default()));
        wiring.add_ports(rtc::PORT, rtc::PORTS, rtc.clone())?;
        Ok(rtc)
    }

    fn save(device: &Shared<Rtc>) -> Result<RtcState, DeviceError> {
        Ok(lock(device).save())
    }
}
