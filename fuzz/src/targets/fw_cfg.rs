//! fw_cfg whose guest sends arbitrary reads, writes and DMA requests.

use crate::Target;
use crate::input::Input;
use jiffy_devices::bus::BusDevice;
use jiffy_devices::fw_cfg::{FwCfg, FwCfgFile};
use jiffy_devices::virtio::testing;
use vm_memory::{Bytes, GuestAddress};

const MEMORY_BYTES: usize = 0x10000;
/// Where the fuzzer's DMA requests are put, 16 bytes each.
const REQUESTS: u64 = 0x100;

const WRITE: u8 = 0x80;
const DMA: u8 = 0x40;

/// This target.
pub const TARGET: Target = Target {
    name: "fw_cfg",
    covers: &["crates/devices/src/fw_cfg"],
    seeds: all_seeds,
    run,
};

fn run(data: &[u8]) {
    let memory = testing::memory(MEMORY_BYTES);
    let files =
        [("opt/config", vec![b'c'; 40]), ("etc/long", vec![7; 5000])].map(|(name, contents)| {
            FwCfgFile {
                name: name.into(),
                contents,
            }
        });
    let mut device = FwCfg::new(files.to_vec(), memory.clone()).expect("good files");
    let before = device.save().files;
    let mut input = Input(data);
    let mut buffer = [0; 4096];
    while !input.is_empty() {
        let operation = input.u8();
        let offset = u64::from(operation & 0x0f);
        if operation & DMA != 0 {
            let request = input.bytes(16);
            let address = GuestAddress(REQUESTS);
            memory.write_slice(request, address).expect("in memory");
            device.write(4, &REQUESTS.to_be_bytes());
        } else if operation & WRITE != 0 {
            let count = usize::from(input.u8() % 12);
            device.write(offset, input.bytes(count));
        } else {
            let count = usize::from(input.u16()) % buffer.len();
            device.read(offset, &mut buffer[..count]);
        }
    }
    let state = device.save();
    assert_eq!(state.files, before, "the guest cannot write");
    let restored = FwCfg::restore(memory, &state).expect("a saved device restores");
    assert_eq!(restored.save(), state);
}

fn all_seeds() -> Vec<Vec<u8>> {
    let select = |key: u16| [&[WRITE, 2][..], &key.to_le_bytes()].concat();
    let read = |count: u16| [&[1][..], &count.to_le_bytes()].concat();
    let dma = |control: u32, length: u32, target: u64| {
        let mut bytes = vec![DMA];
        bytes.extend(control.to_be_bytes());
        bytes.extend(length.to_be_bytes());
        bytes.extend(target.to_be_bytes());
        bytes
    };
    vec![
        [select(0), read(4), select(1), read(4)].concat(),
        [select(0x19), read(4), read(64), read(64)].concat(),
        [select(0x20), read(4000), read(4000), select(0x21), read(40)].concat(),
        [dma(0x20 << 16 | 8 | 2, 5000, 0x1000), dma(2, 100, 0x3000)].concat(),
        [
            dma(0x21 << 16 | 8 | 4, 10, 0),
            dma(2, 8, 0x1000),
            dma(16, 4, 0x1000),
        ]
        .concat(),
    ]
}
