//! A transport whose driver writes any register at any time, over a device
//! that looks at whatever queues it is given.

use crate::Target;
use crate::input::Input;
use jiffy_devices::bus::BusDevice;
use jiffy_devices::virtio::entropy::Entropy;
use jiffy_devices::virtio::mmio::{MmioTransport, WINDOW_BYTES};
use jiffy_devices::virtio::testing::{self, ThreadWorkers};
use std::sync::Arc;
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

const MEMORY_BYTES: usize = 0x10000;

const READ: u8 = 0;
const WRITE: u8 = 1;
const WRITE_WIDE: u8 = 2;
const MEMORY: u8 = 3;
const PAUSE: u8 = 4;
const RESUME: u8 = 5;
const RESTORE: u8 = 6;
const OPERATIONS: u8 = 7;

fn line() -> EventFd {
    EventFd::new(0).expect("an event descriptor")
}

/// This target.
pub const TARGET: Target = Target {
    name: "mmio_transport",
    covers: &["crates/devices/src/virtio/mmio"],
    seeds: all_seeds,
    run,
};

fn run(data: &[u8]) {
    let memory = testing::memory(MEMORY_BYTES);
    let workers = Arc::new(ThreadWorkers);
    let mut transport = MmioTransport::new(Entropy::new(), memory.clone(), workers.clone(), line())
        .expect("event descriptors");
    let mut input = Input(data);
    while !input.is_empty() {
        match input.u8() % OPERATIONS {
            READ => {
                let offset = u64::from(input.u16()) % WINDOW_BYTES;
                let mut buffer = [0; 16];
                let count = usize::from(input.u8()) % buffer.len();
                transport.read(offset, &mut buffer[..count]);
            }
            WRITE => {
                let offset = u64::from(input.u8()) * 4 % 0x108;
                transport.write(offset, &input.u32().to_le_bytes());
            }
            WRITE_WIDE => {
                let offset = u64::from(input.u16()) % WINDOW_BYTES;
                let count = usize::from(input.u8() % 16);
                transport.write(offset, input.bytes(count));
            }
            MEMORY => {
                let address = u64::from(input.u16());
                let count = usize::from(input.u8() % 64);
                let bytes = input.bytes(count);
                let room = MEMORY_BYTES - address as usize;
                let bytes = &bytes[..bytes.len().min(room)];
                memory
                    .write_slice(bytes, GuestAddress(address))
                    .expect("in memory");
            }
            PAUSE => transport.pause(),
            RESUME => {
                let _ = transport.resume();
            }
            _ => {
                transport.pause();
                let state = transport.save().expect("paused");
                let restored = MmioTransport::restore(
                    Entropy::new(),
                    memory.clone(),
                    workers.clone(),
                    line(),
                    &state,
                );
                transport = restored.expect("what was saved can be restored");
                assert_eq!(transport.save().expect("paused"), state);
            }
        }
    }
}

fn all_seeds() -> Vec<Vec<u8>> {
    let write = |register: u16, value: u32| {
        let mut bytes = vec![WRITE, (register / 4) as u8];
        bytes.extend(value.to_le_bytes());
        bytes
    };
    let memory = |address: u16, contents: &[u8]| {
        let mut bytes = vec![MEMORY];
        bytes.extend(address.to_le_bytes());
        bytes.push(contents.len() as u8);
        bytes.extend(contents);
        bytes
    };
    // One buffer of 64 bytes that the device writes, offered once.
    let descriptor = [0, 0x40, 0, 0, 0, 0, 0, 0, 64, 0, 0, 0, 2, 0, 0, 0];
    let bring_up = [
        write(0x70, 1),
        write(0x70, 3),
        write(0x24, 1),
        write(0x20, 1),
        write(0x70, 0xb),
        write(0x30, 0),
        write(0x38, 8),
        write(0x80, 0x1000),
        write(0x90, 0x2000),
        write(0xa0, 0x3000),
        write(0x44, 1),
        memory(0x1000, &descriptor),
        memory(0x2000, &[0, 0, 1, 0, 0, 0]),
        write(0x70, 0xf),
        write(0x50, 0),
        write(0x64, 1),
    ]
    .concat();
    let again = memory(0x2002, &[2]);
    vec![
        [bring_up.clone(), again.clone(), write(0x50, 0)].concat(),
        [bring_up.clone(), vec![PAUSE], again.clone(), vec![RESUME]].concat(),
        [bring_up.clone(), again, vec![RESTORE, RESUME]].concat(),
        [bring_up, write(0x70, 0), vec![READ, 0x70, 0, 4]].concat(),
    ]
}
