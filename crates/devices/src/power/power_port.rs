//! Powers off by one port write.
//!
//! A guest without ACPI has no standard way to power off. QEMU's q35 machine has its ACPI PM1a
//! control register at port 0x604, and small operating systems write 0x2000 (SLP_EN, sleep type 0)
//! there as a constant: `outw(0x604, 0x2000)`. The same write works here.

use super::switch::{PowerRequest, PowerSwitch};
use crate::bus::BusDevice;
use std::sync::Arc;

/// The port.
pub const PORT: u64 = 0x604;
/// Number of ports.
pub const PORTS: u64 = 2;

const SLEEP_ENABLE: u16 = 1 << 13;

/// The power port.
#[derive(Debug)]
pub struct PowerPort {
    switch: Arc<PowerSwitch>,
}

impl PowerPort {
    /// A port that sets `switch`. It has no state to save.
    pub fn new(switch: Arc<PowerSwitch>) -> PowerPort {
        PowerPort { switch }
    }
}

impl BusDevice for PowerPort {
    fn read(&mut self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        if let (0, [low, high]) = (offset, data)
            && u16::from_le_bytes([*low, *high]) & SLEEP_ENABLE != 0
        {
            self.switch.ask(PowerRequest::PowerOff);
        }
    }
}
