use super::keyboard_controller::PORTS;
use super::*;
use crate::bus::BusDevice;
use std::sync::Arc;

fn controller() -> (KeyboardController, Arc<PowerSwitch>) {
    let switch = Arc::new(PowerSwitch::new().unwrap());
    (KeyboardController::new(switch.clone()), switch)
}

fn read(device: &mut KeyboardController, offset: u64) -> u8 {
    let mut data = [0];
    device.read(offset, &mut data);
    data[0]
}

#[test]
fn the_reset_command_resets() {
    let (mut controller, switch) = controller();
    // As Linux does: waits until the input buffer is empty, then pulses the reset line.
    assert_eq!(read(&mut controller, 4) & 0x02, 0);
    assert_eq!(switch.request(), None);
    controller.write(4, &[0xfe]);
    assert_eq!(switch.request(), Some(PowerRequest::Reset));
    assert_eq!(switch.event().read().unwrap(), 1);
}

#[test]
fn a_driver_finds_a_working_controller_without_devices() {
    let (mut controller, switch) = controller();
    assert_eq!(read(&mut controller, 4) & 0x01, 0, "nothing to read yet");
    controller.write(4, &[0xaa]);
    assert_eq!(read(&mut controller, 4) & 0x01, 1);
    assert_eq!(read(&mut controller, 0), 0x55);
    assert_eq!(read(&mut controller, 4) & 0x01, 0, "it was read");
    // The configuration byte can be read back.
    controller.write(4, &[0x60]);
    controller.write(0, &[0x43]);
    controller.write(4, &[0x20]);
    assert_eq!(read(&mut controller, 0), 0x43);
    // There is no auxiliary port.
    controller.write(4, &[0xa9]);
    assert_ne!(read(&mut controller, 0), 0);
    assert_eq!(switch.request(), None);
}

#[test]
fn no_access_panics_the_controller() {
    let (mut controller, switch) = controller();
    for offset in 0..PORTS {
        for byte in (0..=255).filter(|byte| *byte != 0xfe) {
            controller.write(offset, &[byte]);
            read(&mut controller, offset);
        }
    }
    assert_eq!(switch.request(), None);
    assert_eq!(read(&mut controller, 1), 0xff);
}

#[test]
fn a_restored_controller_still_waits_for_its_byte() {
    let (mut controller, switch) = controller();
    controller.write(4, &[0x60]);
    let state = controller.save();
    let mut restored = KeyboardController::restore(switch, &state);
    assert_eq!(restored.save(), state);
    restored.write(0, &[0x47]);
    assert_eq!(restored.save().configuration, 0x47);
}

#[test]
fn the_power_port_accepts_only_its_command_word() {
    let switch = Arc::new(PowerSwitch::new().unwrap());
    let mut port = PowerPort::new(switch.clone());
    for wrong in [&[0x00][..], &[0x00, 0x10], &[], &[0, 0x20, 0, 0]] {
        port.write(0, wrong);
    }
    port.write(1, &[0x00, 0x20]);
    assert_eq!(switch.request(), None);
    port.write(0, &0x2000_u16.to_le_bytes());
    assert_eq!(switch.request(), Some(PowerRequest::PowerOff));
}

#[test]
fn the_first_power_request_wins() {
    let switch = PowerSwitch::new().unwrap();
    switch.ask(PowerRequest::PowerOff);
    switch.ask(PowerRequest::Reset);
    assert_eq!(switch.request(), Some(PowerRequest::PowerOff));
    assert_eq!(switch.event().read().unwrap(), 1);
    assert!(switch.event().read().is_err(), "rings once");
}
