//! What a snapshot keeps of a VM beside its memory, with any bytes: as they are, or with
//! length and checksum made right; and devices that are restored from it and used.

use crate::Target;
use crate::input::Input;
use jiffy_devices::bus::BusDevice;
use jiffy_devices::fw_cfg::FwCfg;
use jiffy_devices::power::{KeyboardController, PowerSwitch};
use jiffy_devices::rtc::Rtc;
use jiffy_devices::serial::Serial;
use jiffy_devices::trace::TracePort;
use jiffy_devices::virtio::balloon::{Balloon, BalloonArgs, Reclaim};
use jiffy_devices::virtio::device::VirtioDevice;
use jiffy_devices::virtio::entropy::Entropy;
use jiffy_devices::virtio::mmio::{MmioTransport, MmioTransportState, WINDOW_BYTES};
use jiffy_devices::virtio::testing::{self, ThreadWorkers};
use jiffy_vmm::VmState;
use jiffy_vmm::devices::DevicesState;
use jiffy_vmm::devices::balloon::BalloonKind;
use jiffy_vmm::devices::entropy::EntropyKind;
use jiffy_vmm::devices::fw_cfg::FwCfgKind;
use jiffy_vmm::devices::kind::DeviceKind;
use jiffy_vmm::devices::power::PowerKind;
use jiffy_vmm::devices::rtc::RtcKind;
use jiffy_vmm::devices::serial::SerialKind;
use jiffy_vmm::devices::trace::TraceKind;
use jiffy_vmm::devices::virtio::Virtio;
use jiffy_wire::state::{HEADER, RELEASE};
use std::io;
use std::sync::Arc;
use vm_memory::GuestAddress;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// This target.
pub const TARGET: Target = Target {
    name: "vmm_state",
    covers: &[
        "crates/vmm/src/state",
        "crates/vmm/src/sections.rs",
        "crates/wire/src/state.rs",
    ],
    seeds: all_seeds,
    run,
};

const MEMORY_BYTES: usize = 0x10000;

struct Nothing;

impl Reclaim for Nothing {
    fn release(&self, _: GuestAddress, _: u64) -> io::Result<()> {
        Ok(())
    }
}

fn line() -> EventFd {
    EventFd::new(EFD_NONBLOCK).expect("an event descriptor")
}

fn run(data: &[u8]) {
    let mut input = Input(data);
    let sealed = input.u8() % 2 == 1;
    let mut bytes = input.rest().to_vec();
    if sealed {
        seal(&mut bytes);
    }
    let Ok(state) = VmState::decode(&bytes) else {
        return;
    };
    let written = state.encode();
    let again = VmState::decode(&written).expect("what was written is read");
    assert!(again.encode() == written);
    restore(&state.devices);
}

/// Length and checksum are those of what follows.
fn seal(bytes: &mut [u8]) {
    let Some((header, rest)) = bytes.split_at_mut_checked(HEADER) else {
        return;
    };
    let body = match header[8] {
        1 => rest.len(),
        _ => rest.len().saturating_sub(RELEASE),
    };
    header[12..16].copy_from_slice(&crc_fast::crc32_iscsi(rest).to_le_bytes());
    header[16..24].copy_from_slice(&(body as u64).to_le_bytes());
}

/// Devices that fit their state are used; memory is much smaller than they think.
fn restore(state: &DevicesState) {
    let memory = testing::memory(MEMORY_BYTES);
    if let Ok(mut device) = FwCfg::restore(memory, the::<FwCfgKind>(state)) {
        device.read(1, &mut [0; 64]);
        device.write(0, &[0x19, 0]);
        device.read(1, &mut [0; 64]);
    }
    if let Some(serial) = state.of::<SerialKind>().next()
        && let Ok(mut serial) = Serial::restore(line(), Box::new(io::sink()), serial)
    {
        (0..8).for_each(|offset| serial.read(offset, &mut [0]));
        serial.write(0, b"x");
        serial.save();
    }
    let switch = Arc::new(PowerSwitch::new().expect("an event descriptor"));
    let mut keyboard = KeyboardController::restore(switch, the::<PowerKind>(state));
    (0..5).for_each(|offset| keyboard.read(offset, &mut [0]));
    keyboard.write(0, &[1]);
    Rtc::restore(the::<RtcKind>(state)).read(1, &mut [0]);
    TracePort::restore(4, Box::new(|_| {}), the::<TraceKind>(state)).write(0, &[1]);
    if let Some((transport, _)) = state.of::<Virtio<EntropyKind>>().next() {
        used(Entropy::new(), transport);
    }
    if let Some((transport, balloon)) = state.of::<Virtio<BalloonKind>>().next() {
        let args = BalloonArgs {
            ram_bytes: 128 << 20,
            reclaim: Arc::new(Nothing),
        };
        if let Ok(balloon) = Balloon::restore(args, balloon) {
            used(balloon, transport);
        }
    }
}

/// The state of a device that every VM has.
fn the<K: DeviceKind>(state: &DevicesState) -> &K::State {
    state
        .of::<K>()
        .next()
        .expect("a state without it is refused")
}

fn used<D: VirtioDevice>(device: D, state: &MmioTransportState) {
    let memory = testing::memory(MEMORY_BYTES);
    let workers = Arc::new(ThreadWorkers);
    let Ok(mut transport) = MmioTransport::restore(device, memory, workers, line(), state) else {
        return;
    };
    let _ = transport.resume();
    for offset in (0..WINDOW_BYTES).step_by(4) {
        transport.read(offset, &mut [0; 4]);
    }
    transport.write(0x50, &0u32.to_le_bytes());
    transport.pause();
    transport.save().expect("paused");
}

fn all_seeds() -> Vec<Vec<u8>> {
    let golden = [
        &include_bytes!("../../../crates/vmm/golden/state-1")[..],
        include_bytes!("../../../crates/vmm/golden/state-2"),
        include_bytes!("../../../crates/vmm/golden/state-3"),
    ];
    golden
        .iter()
        .flat_map(|state| [0, 1].map(|sealed| [&[sealed], *state].concat()))
        .collect()
}
