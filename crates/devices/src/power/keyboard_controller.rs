//! The PC's keyboard controller (Intel 8042), without a keyboard.
//!
//! It provides the reset command, and answers its self-test and the test of its ports, because
//! operating systems wait seconds for a controller that does not answer.

use super::switch::{PowerRequest, PowerSwitch};
use crate::bus::BusDevice;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// First port: data.
pub const PORT: u64 = 0x60;
/// Number of ports. Those between the first and the last do not belong to the controller and
/// behave like absent ports (KVM's timer takes 0x61).
pub const PORTS: u64 = 5;

// Offsets from `PORT`.
const DATA: u64 = 0;
const COMMAND: u64 = 4;

const OUTPUT_FULL: u8 = 1 << 0;
const SYSTEM_FLAG: u8 = 1 << 2;

const READ_CONFIGURATION: u8 = 0x20;
const WRITE_CONFIGURATION: u8 = 0x60;
const TEST_AUXILIARY: u8 = 0xa9;
const SELF_TEST: u8 = 0xaa;
const TEST_KEYBOARD: u8 = 0xab;
const WRITE_KEYBOARD_OUTPUT: u8 = 0xd2;
const WRITE_AUXILIARY_OUTPUT: u8 = 0xd3;
const WRITE_AUXILIARY: u8 = 0xd4;
const PULSE_RESET: u8 = 0xfe;

const SELF_TEST_PASSED: u8 = 0x55;
const PORT_WORKS: u8 = 0x00;
const PORT_STUCK: u8 = 0x01;

/// The controller.
#[derive(Debug)]
pub struct KeyboardController {
    switch: Arc<PowerSwitch>,
    state: KeyboardControllerState,
}

/// A saved keyboard controller.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyboardControllerState {
    /// The configuration byte.
    pub configuration: u8,
    /// A byte for the guest to read from the data port.
    pub output: Option<u8>,
    /// A command that waits for its data byte.
    pub command: Option<u8>,
}

impl KeyboardController {
    /// A controller after reset; its reset command sets `switch`.
    pub fn new(switch: Arc<PowerSwitch>) -> KeyboardController {
        KeyboardController::restore(switch, &KeyboardControllerState::default())
    }

    /// Restores a saved controller.
    pub fn restore(
        switch: Arc<PowerSwitch>,
        state: &KeyboardControllerState,
    ) -> KeyboardController {
        let state = *state;
        KeyboardController { switch, state }
    }

    /// The controller's state.
    pub fn save(&self) -> KeyboardControllerState {
        self.state
    }

    fn command(&mut self, command: u8) {
        self.state.command = None;
        match command {
            PULSE_RESET => self.switch.ask(PowerRequest::Reset),
            READ_CONFIGURATION => self.state.output = Some(self.state.configuration),
            SELF_TEST => self.state.output = Some(SELF_TEST_PASSED),
            TEST_KEYBOARD => self.state.output = Some(PORT_WORKS),
            TEST_AUXILIARY => self.state.output = Some(PORT_STUCK),
            WRITE_CONFIGURATION
            | WRITE_KEYBOARD_OUTPUT
            | WRITE_AUXILIARY_OUTPUT
            | WRITE_AUXILIARY => self.state.command = Some(command),
            _ => {}
        }
    }

    fn data(&mut self, byte: u8) {
        match self.state.command.take() {
            Some(WRITE_CONFIGURATION) => self.state.configuration = byte,
            // The byte is returned as the keyboard's, so a driver that tests the auxiliary port
            // finds that there is none.
            Some(WRITE_KEYBOARD_OUTPUT | WRITE_AUXILIARY_OUTPUT) => {
                self.state.output = Some(byte);
            }
            // Bytes for a keyboard or mouse that does not exist.
            _ => {}
        }
    }
}

impl BusDevice for KeyboardController {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        let value = match offset {
            DATA => self.state.output.take().unwrap_or(0),
            COMMAND if self.state.output.is_some() => SYSTEM_FLAG | OUTPUT_FULL,
            COMMAND => SYSTEM_FLAG,
            _ => 0xff,
        };
        data.fill(value);
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        for byte in data {
            match offset {
                DATA => self.data(*byte),
                COMMAND => self.command(*byte),
                _ => {}
            }
        }
    }
}
