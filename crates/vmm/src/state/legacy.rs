//! The body of versions 1 and 2: one tree in postcard's format, whose fields have no names. Nothing
//! here may change: when a section gets a new version, the old type is kept for these versions.

use super::{StateError, VmState};
use crate::devices::DevicesState;
use crate::devices::balloon::BalloonKind;
use crate::devices::block::BlockKind;
use crate::devices::entropy::EntropyKind;
use crate::devices::fw_cfg::FwCfgKind;
use crate::devices::power::PowerKind;
use crate::devices::rtc::RtcKind;
use crate::devices::serial::SerialKind;
use crate::devices::trace::TraceKind;
use crate::devices::virtio::Virtio;
use crate::devices::vsock::VsockKind;
use crate::irq::ChipsState;
use crate::vcpu::VcpuState;
use jiffy_devices::fw_cfg::FwCfgState;
use jiffy_devices::power::KeyboardControllerState;
use jiffy_devices::rtc::RtcState;
use jiffy_devices::serial::SerialState;
use jiffy_devices::trace::TraceState;
use jiffy_devices::virtio::balloon::BalloonState;
use jiffy_devices::virtio::block::BlockState;
use jiffy_devices::virtio::entropy::EntropyState;
use jiffy_devices::virtio::mmio::MmioTransportState;
use jiffy_devices::virtio::vsock::VsockState;
use kvm_bindings::{kvm_irqchip, kvm_pit_state2};
use serde::Deserialize;

#[derive(Deserialize)]
struct Tree {
    memory_size: u64,
    vcpus: Vec<VcpuState>,
    chips: Chips,
    devices: Devices,
}

#[derive(Deserialize)]
struct Chips {
    pic_master: kvm_irqchip,
    pic_slave: kvm_irqchip,
    ioapic: kvm_irqchip,
    pit: Option<kvm_pit_state2>,
    clock_ns: u64,
}

#[derive(Deserialize)]
struct Devices {
    disks: Vec<(MmioTransportState, BlockState)>,
    vsock: Option<(MmioTransportState, VsockState)>,
    entropy: Option<(MmioTransportState, EntropyState)>,
    balloon: Option<(MmioTransportState, BalloonState)>,
    serial: Option<SerialState>,
    fw_cfg: FwCfgState,
    keyboard: KeyboardControllerState,
    rtc: RtcState,
    trace: TraceState,
}

/// Reads the body of version 1 or 2.
///
/// # Errors
///
/// If it is not valid, or bytes are left over.
pub fn read(body: &[u8]) -> Result<VmState, StateError> {
    let (tree, rest): (Tree, _) =
        postcard::take_from_bytes(body).map_err(|error| StateError::Contents(error.to_string()))?;
    if !rest.is_empty() {
        return Err(StateError::Contents("bytes are left over".into()));
    }
    let (chips, devices) = (tree.chips, tree.devices);
    let mut saved = DevicesState::default();
    saved.extend::<Virtio<BlockKind>>(devices.disks);
    saved.extend::<Virtio<VsockKind>>(devices.vsock);
    saved.extend::<Virtio<EntropyKind>>(devices.entropy);
    saved.extend::<Virtio<BalloonKind>>(devices.balloon);
    saved.extend::<SerialKind>(devices.serial);
    saved.push::<FwCfgKind>(devices.fw_cfg);
    saved.push::<PowerKind>(devices.keyboard);
    saved.push::<RtcKind>(devices.rtc);
    saved.push::<TraceKind>(devices.trace);
    Ok(VmState {
        memory_size: tree.memory_size,
        vcpus: tree.vcpus,
        chips: ChipsState {
            pic_master: chips.pic_master,
            pic_slave: chips.pic_slave,
            ioapic: chips.ioapic,
            pit: chips.pit,
            pit_programmed: Default::default(),
            clock_ns: chips.clock_ns,
        },
        devices: saved,
    })
}
