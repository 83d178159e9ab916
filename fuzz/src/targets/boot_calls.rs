//! What a guest's kernel notes in the memory that `--timeline=deep` offers.

use crate::Target;
use jiffy_devices::virtio::testing;
use jiffy_vmm::boot::calls::{self, TscClock};
use std::collections::BTreeMap;
use vm_memory::{Bytes, GuestAddress};

/// This target.
pub const TARGET: Target = Target {
    name: "boot_calls",
    covers: &["crates/vmm/src/boot/calls"],
    seeds: all_seeds,
    run,
};

/// Where the memory is; it begins with the capacity, which is overwritten, too.
const OFFERED: u64 = 0x3_0000;
const OFFERED_BYTES: usize = 0x1_0000;
const RECORD: usize = 16;

fn run(data: &[u8]) {
    let memory = testing::memory(OFFERED as usize + OFFERED_BYTES);
    assert_eq!(calls::offer(&memory), "boot.calls=0x30000");
    let data = &data[..data.len().min(OFFERED_BYTES)];
    let start = GuestAddress(OFFERED);
    memory.write_slice(data, start).expect("it is in memory");
    let notes = calls::read(&memory);
    assert!(notes.noted.len() <= data.len().div_ceil(RECORD));
    assert!(notes.functions().iter().all(|address| address >> 63 == 1));
    let clock = TscClock {
        tsc: 1 << 40,
        at_ns: 1 << 40,
        khz: 2_000_000,
    };
    for span in notes.spans(&BTreeMap::new(), &clock, 1 << 41) {
        assert!(span.start_ns.checked_add(span.length_ns).is_some());
        assert!(span.name.len() < 80);
        assert!(span.name.bytes().all(|byte| (b' '..=b'~').contains(&byte)));
    }
}

fn all_seeds() -> Vec<Vec<u8>> {
    let record = |tsc: u64, word: u64| [tsc.to_le_bytes(), word.to_le_bytes()].concat();
    let event =
        |tsc: u64, kind: u64, pid: u64, number: u64| record(tsc, kind << 56 | number << 24 | pid);
    let name = |name: &str| {
        let mut bytes = name.as_bytes().to_vec();
        bytes.resize(RECORD, 0);
        bytes
    };
    let memory = |count: u32, records: &[Vec<u8>]| {
        let header = [0xfff_u32.to_le_bytes(), count.to_le_bytes()].concat();
        [header, records.concat()].concat()
    };
    let call = 0xffff_ffff_8100_0000;
    vec![
        memory(2, &[record(1, call), record(2, call & !(1 << 63))]),
        memory(
            4,
            &[
                event(1, 1, 1, 0),
                name("virtio_rng"),
                name("virtio0"),
                event(2, 2, 1, 19),
            ],
        ),
        memory(
            5,
            &[
                event(1, 3, 1, 0),
                event(2, 6, 1, 0),
                name("init"),
                event(3, 4, 9, 1),
                event(4, 7, 1, 0x100),
            ],
        ),
        memory(
            4,
            &[
                event(1, 5, 2, 0),
                name("kthreadd"),
                event(2, 7, 2, 9),
                event(3, 6, 3, 0),
            ],
        ),
        memory(u32::MAX, &[event(1, 6, 1, 0)]),
    ]
}
