//! The sections of devices. A new device is a kind of section, and a line in each of
//! the functions here; one whose state changed has a new version.

use super::StateError;
use super::sections::{Kind, Release, Sections, Writer};
use crate::devices::DevicesState;

const DISK: Kind = Kind::new("disk", 1);
const VSOCK: Kind = Kind::new("vsock", 1);
const ENTROPY: Kind = Kind::new("entropy", 1);
const BALLOON: Kind = Kind::new("balloon", 1);
const SERIAL: Kind = Kind::new("serial", 1);
const FW_CFG: Kind = Kind::new("fw_cfg", 1);
const KEYBOARD: Kind = Kind::new("keyboard", 1);
const RTC: Kind = Kind::new("rtc", 1);
const TRACE: Kind = Kind::new("trace", 1);

/// A section for each device, disks in their order.
pub fn write(devices: &DevicesState, parts: &mut Writer) {
    for disk in &devices.disks {
        parts.put(DISK, disk);
    }
    parts.put_some(VSOCK, devices.vsock.as_ref());
    parts.put_some(ENTROPY, devices.entropy.as_ref());
    parts.put_some(BALLOON, devices.balloon.as_ref());
    parts.put_some(SERIAL, devices.serial.as_ref());
    parts.put(FW_CFG, &devices.fw_cfg);
    parts.put(KEYBOARD, &devices.keyboard);
    parts.put(RTC, &devices.rtc);
    parts.put(TRACE, &devices.trace);
}

/// Takes what [`write`] wrote.
pub fn read(parts: &mut Sections<'_>, release: Release<'_>) -> Result<DevicesState, StateError> {
    Ok(DevicesState {
        disks: parts.all(DISK, release)?,
        vsock: parts.optional(VSOCK, release)?,
        entropy: parts.optional(ENTROPY, release)?,
        balloon: parts.optional(BALLOON, release)?,
        serial: parts.optional(SERIAL, release)?,
        fw_cfg: parts.one(FW_CFG, release)?,
        keyboard: parts.one(KEYBOARD, release)?,
        rtc: parts.one(RTC, release)?,
        trace: parts.one(TRACE, release)?,
    })
}
