//! Reset and power off: the keyboard controller and the power port.

use super::error::DeviceError;
use super::kind::DeviceKind;
use super::wiring::Wiring;
use super::{Shared, shared};
use crate::sections::{Count, Section};
use jiffy_devices::power::{
    KeyboardController, KeyboardControllerState, PowerPort, keyboard_controller, power_port,
};
use jiffy_sys::mutex::lock;
use jiffy_wire::vmm::VmmConfig;

/// Both devices; only the keyboard controller has a state.
#[derive(Debug)]
pub struct PowerKind;

impl DeviceKind for PowerKind {
    type Device = Shared<KeyboardController>;
    type State = KeyboardControllerState;
    const SECTION: Section = Section::new("keyboard", 1);
    const NAME: &'static str = "a keyboard controller";
    const COUNT: Count = Count::One;

    fn count(_config: &VmmConfig) -> usize {
        1
    }

    fn attach(
        wiring: &mut Wiring<'_>,
        _number: usize,
        state: Option<&KeyboardControllerState>,
    ) -> Result<Shared<KeyboardController>, DeviceError> {
        let state = state.copied().unwrap_or_default();
        let keyboard = shared(KeyboardController::restore(wiring.power.clone(), &state));
        wiring.add_ports(
            keyboard_controller::PORT,
            keyboard_controller::PORTS,
            keyboard.clone(),
        )?;
        let port = shared(PowerPort::new(wiring.power.clone()));
        wiring.add_ports(power_port::PORT, power_port::PORTS, port)?;
        Ok(keyboard)
    }

    fn save(device: &Shared<KeyboardController>) -> Result<KeyboardControllerState, DeviceError> {
        Ok(lock(device).save())
    }
}
