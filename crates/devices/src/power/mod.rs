//! Devices with which a guest resets or powers off its VM.
//!
//! * [`switch`]: passes the devices' requests on to the VMM.
//! * [`keyboard_controller`]: port 0x64, byte 0xfe: reset, as on a PC.
//! * [`power_port`]: port 0x604, value 0x2000: power off.

pub mod keyboard_controller;
pub mod power_port;
pub mod switch;

#[cfg(test)]
mod tests;

pub use keyboard_controller::{KeyboardController, KeyboardControllerState};
pub use power_port::PowerPort;
pub use switch::{PowerRequest, PowerSwitch};
