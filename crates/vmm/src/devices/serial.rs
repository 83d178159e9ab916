//! COM1.

use super::error::DeviceError;
use super::kind::DeviceKind;
use super::wiring::Wiring;
use super::{Devices, Shared, shared};
use crate::sections::{Count, Section};
use jiffy_devices::serial::{self, ConsoleLog, Serial, SerialState};
use jiffy_sys::mutex::lock;
use jiffy_wire::vmm::{Serial as SerialConfig, VmmConfig};
use std::io::{self, Write};

/// The serial port.
#[derive(Debug)]
pub struct SerialKind;

impl DeviceKind for SerialKind {
    type Device = Shared<Serial>;
    type State = SerialState;
    const SECTION: Section = Section::new("serial", 1);
    const NAME: &'static str = "a serial port";
    const COUNT: Count = Count::AtMostOne;

    fn count(config: &VmmConfig) -> usize {
        config.serial.iter().len()
    }

    fn attach(
        wiring: &mut Wiring<'_>,
        number: usize,
        state: Option<&SerialState>,
    ) -> Result<Shared<Serial>, DeviceError> {
        let output = output(&wiring.args.config.serial.as_slice()[number])?;
        let line = wiring.interrupt(serial::IRQ)?;
        let serial = shared(match state {
            None => Serial::new(line, output)?,
            Some(state) => Serial::restore(line, output, state)?,
        });
        wiring.add_ports(serial::PORT, serial::PORTS, serial.clone())?;
        Ok(serial)
    }

    fn resume(device: &Shared<Serial>) {
        lock(device).repeat();
    }

    fn save(device: &Shared<Serial>) -> Result<SerialState, DeviceError> {
        Ok(lock(device).save())
    }
}

impl Devices {
    /// COM1, if the VM has one.
    pub fn serial(&self) -> Option<&Shared<Serial>> {
        self.first::<SerialKind>()
    }
}

fn output(config: &SerialConfig) -> Result<Box<dyn Write + Send>, DeviceError> {
    match config {
        SerialConfig::Stdio => Ok(Box::new(io::stdout())),
        SerialConfig::File(path) => {
            let log = ConsoleLog::open(path).map_err(|source| DeviceError::Console {
                path: path.clone(),
                source,
            })?;
            Ok(Box::new(log))
        }
    }
}
