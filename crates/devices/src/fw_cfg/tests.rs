use super::*;
use crate::GuestMemory;
use crate::bus::BusDevice;
use proptest::prelude::*;
use std::sync::Arc;
use vm_memory::{Bytes, GuestAddress};

const SELECTOR: u64 = 0;
const DATA: u64 = 1;
const DMA: u64 = 4;

const ERROR: u32 = 1;
const READ: u32 = 2;
const SKIP: u32 = 4;
const SELECT: u32 = 8;
const WRITE: u32 = 16;

const MEMORY_BYTES: u64 = 0x10000;
const REQUEST: u64 = 0x100;
const TARGET: u64 = 0x1000;

fn file(name: &str, contents: &[u8]) -> FwCfgFile {
    FwCfgFile {
        name: name.to_owned(),
        contents: contents.to_vec(),
    }
}

fn device(files: Vec<FwCfgFile>) -> (FwCfg, Arc<GuestMemory>) {
    let memory = GuestMemory::from_ranges(&[(GuestAddress(0), MEMORY_BYTES as usize)]).unwrap();
    let memory = Arc::new(memory);
    (FwCfg::new(files, memory.clone()).unwrap(), memory)
}

fn two_files() -> (FwCfg, Arc<GuestMemory>) {
    device(vec![
        file("opt/jiffy/config", b"{\"hostname\":\"a\"}"),
        file("opt/another", &[7; 300]),
    ])
}

fn select(device: &mut FwCfg, selector: u16) {
    device.write(SELECTOR, &selector.to_le_bytes());
}

fn read(device: &mut FwCfg, count: usize) -> Vec<u8> {
    let mut data = vec![0xee; count];
    device.read(DATA, &mut data);
    data
}

/// Runs a DMA request; returns its control word afterwards.
fn dma(device: &mut FwCfg, memory: &GuestMemory, control: u32, length: u32, target: u64) -> u32 {
    let mut request = Vec::new();
    request.extend(control.to_be_bytes());
    request.extend(length.to_be_bytes());
    request.extend(target.to_be_bytes());
    memory.write_slice(&request, GuestAddress(REQUEST)).unwrap();
    device.write(DMA, &((REQUEST >> 32) as u32).to_be_bytes());
    device.write(DMA + 4, &(REQUEST as u32).to_be_bytes());
    u32::from_be(memory.read_obj(GuestAddress(REQUEST)).unwrap())
}

fn bytes(memory: &GuestMemory, address: u64, count: usize) -> Vec<u8> {
    let mut data = vec![0; count];
    memory.read_slice(&mut data, GuestAddress(address)).unwrap();
    data
}

#[test]
fn a_driver_finds_signature_features_and_dma() {
    let (mut device, _) = two_files();
    select(&mut device, 0);
    assert_eq!(read(&mut device, 4), b"QEMU");
    select(&mut device, 1);
    assert_eq!(read(&mut device, 4), 3u32.to_le_bytes());
    let mut signature = [0; 8];
    device.read(DMA, &mut signature);
    assert_eq!(&signature, b"QEMU CFG");
    let mut low = [0; 4];
    device.read(DMA + 4, &mut low);
    assert_eq!(&low, b" CFG");
}

#[test]
fn the_directory_lists_the_files_by_name() {
    let (mut device, _) = two_files();
    select(&mut device, 0x19);
    assert_eq!(read(&mut device, 4), 2u32.to_be_bytes());
    for (name, size, selector) in [
        ("opt/another", 300u32, 0x20u16),
        ("opt/jiffy/config", 16, 0x21),
    ] {
        assert_eq!(read(&mut device, 4), size.to_be_bytes());
        assert_eq!(read(&mut device, 2), selector.to_be_bytes());
        assert_eq!(read(&mut device, 2), [0, 0]);
        let entry = read(&mut device, 56);
        let length = entry.iter().position(|byte| *byte == 0).unwrap();
        assert_eq!(&entry[..length], name.as_bytes());
        assert!(entry[length..].iter().all(|byte| *byte == 0));
    }
}

#[test]
fn a_file_reads_the_same_byte_by_byte_at_once_and_after_another() {
    let (mut device, _) = two_files();
    select(&mut device, 0x21);
    let at_once = read(&mut device, 16);
    assert_eq!(at_once, b"{\"hostname\":\"a\"}");
    select(&mut device, 0x20);
    read(&mut device, 10);
    select(&mut device, 0x21);
    let singly: Vec<u8> = (0..16).flat_map(|_| read(&mut device, 1)).collect();
    assert_eq!(singly, at_once);
    assert_eq!(read(&mut device, 3), [0; 3], "zeros after the end");
}

#[test]
fn unknown_selectors_read_as_zeros() {
    let (mut device, _) = two_files();
    for selector in [0x02, 0x1f, 0x22, 0x3fff, 0x8000, 0x8021, 0xffff] {
        select(&mut device, selector);
        assert_eq!(read(&mut device, 4), [0; 4], "{selector:#x}");
    }
}

#[test]
fn the_guest_cannot_write() {
    let (mut device, memory) = two_files();
    select(&mut device, 0x21 | 1 << 14);
    device.write(DATA, b"XXXX");
    device.write(SELECTOR, b"X");
    assert_eq!(dma(&mut device, &memory, WRITE, 4, TARGET), ERROR);
    let select_and_write = 0x21 << 16 | SELECT | WRITE;
    assert_eq!(
        dma(&mut device, &memory, select_and_write, 4, TARGET),
        ERROR
    );
    select(&mut device, 0x21);
    assert_eq!(read(&mut device, 16), b"{\"hostname\":\"a\"}");
}

#[test]
fn dma_selects_skips_and_reads() {
    let (mut device, memory) = two_files();
    assert_eq!(
        dma(&mut device, &memory, 0x21 << 16 | SELECT | SKIP, 2, 0),
        0
    );
    assert_eq!(dma(&mut device, &memory, READ, 8, TARGET), 0);
    assert_eq!(bytes(&memory, TARGET, 8), b"hostname");
    // The next request continues where the last one stopped, and returns zeros past the end.
    memory
        .write_slice(&[0xee; 6000], GuestAddress(TARGET))
        .unwrap();
    assert_eq!(dma(&mut device, &memory, READ, 5000, TARGET), 0);
    let got = bytes(&memory, TARGET, 6000);
    assert_eq!(&got[..6], b"\":\"a\"}");
    assert!(got[6..5000].iter().all(|byte| *byte == 0));
    assert!(got[5000..].iter().all(|byte| *byte == 0xee));
    // The data port continues at DMA's offset.
    assert_eq!(read(&mut device, 1), [0]);
}

#[test]
fn one_write_of_eight_bytes_starts_dma_too() {
    let (mut device, memory) = two_files();
    let mut request = Vec::new();
    request.extend((READ | SELECT).to_be_bytes());
    request.extend(4u32.to_be_bytes());
    request.extend(TARGET.to_be_bytes());
    memory.write_slice(&request, GuestAddress(REQUEST)).unwrap();
    device.write(DMA, &REQUEST.to_be_bytes());
    assert_eq!(bytes(&memory, TARGET, 4), b"QEMU");
}

#[test]
fn dma_outside_guest_memory_fails_and_writes_nothing() {
    let (mut device, memory) = two_files();
    select(&mut device, 0);
    for target in [MEMORY_BYTES - 2, MEMORY_BYTES, u64::MAX - 1, u64::MAX] {
        assert_eq!(dma(&mut device, &memory, READ, 4, target), ERROR);
    }
    assert_eq!(bytes(&memory, MEMORY_BYTES - 2, 2), [0, 0]);
    assert_eq!(dma(&mut device, &memory, READ, u32::MAX, 0), ERROR);
    assert_eq!(dma(&mut device, &memory, READ, 4, MEMORY_BYTES - 4), 0);
    // A request that is not in guest memory can't be answered.
    for address in [MEMORY_BYTES - 15, u64::MAX] {
        device.write(DMA, &address.to_be_bytes());
    }
}

#[test]
fn a_dma_read_of_no_bytes_and_a_request_without_bits_succeed() {
    let (mut device, memory) = two_files();
    assert_eq!(dma(&mut device, &memory, READ, 0, u64::MAX), 0);
    assert_eq!(dma(&mut device, &memory, 0, 0, 0), 0);
    assert_eq!(dma(&mut device, &memory, SKIP, u32::MAX, 0), 0);
    assert_eq!(dma(&mut device, &memory, SKIP, u32::MAX, 0), 0);
    assert_eq!(read(&mut device, 2), [0; 2]);
}

#[test]
fn bad_files_are_refused() {
    let (_, memory) = device(Vec::new());
    let new = |files| FwCfg::new(files, memory.clone()).unwrap_err();
    let long = "x".repeat(NAME_MAX + 1);
    assert_eq!(new(vec![file(&long, b"")]), FwCfgError::Name(long.clone()));
    assert_eq!(new(vec![file("", b"")]), FwCfgError::Name(String::new()));
    assert_eq!(
        new(vec![file("a\0b", b"")]),
        FwCfgError::Name("a\0b".into())
    );
    assert_eq!(
        new(vec![file("a", b""), file("a", b"1")]),
        FwCfgError::Duplicate("a".into())
    );
    let many = (0..=FILES_MAX).map(|n| file(&n.to_string(), b"")).collect();
    assert_eq!(new(many), FwCfgError::TooMany(FILES_MAX + 1));
    let most = "y".repeat(NAME_MAX);
    assert!(FwCfg::new(vec![file(&most, b"1")], memory.clone()).is_ok());
}

#[test]
fn a_restored_device_continues_at_its_offset() {
    let (mut device, memory) = two_files();
    select(&mut device, 0x21);
    read(&mut device, 2);
    device.write(DMA, &[0, 0, 0, 1]);
    let state = device.save();
    let mut restored = FwCfg::restore(memory, &state).unwrap();
    assert_eq!(restored.save(), state);
    assert_eq!(read(&mut restored, 8), b"hostname");
}

proptest! {
    #[test]
    fn no_access_panics_and_the_files_stay(
        accesses in proptest::collection::vec((any::<bool>(), 0u64..14, proptest::collection::vec(any::<u8>(), 0..12)), 0..100),
        requests in proptest::collection::vec((any::<u32>(), prop_oneof![0u32..100, any::<u32>()], prop_oneof![0u64..MEMORY_BYTES, any::<u64>()]), 0..20),
    ) {
        let (mut device, memory) = two_files();
        let before = device.save().files;
        for (is_write, offset, mut data) in accesses {
            if is_write {
                device.write(offset, &data);
            } else {
                device.read(offset, &mut data);
            }
        }
        for (control, length, target) in requests {
            dma(&mut device, &memory, control, length, target);
        }
        prop_assert_eq!(device.save().files, before);
    }
}

#[test]
fn a_refreshed_file_is_generated_when_it_is_selected() {
    let files = [("a", b"aaaa"), ("now", b"0000"), ("z", b"zzzz")];
    let (mut device, _) = device(files.map(|(name, text)| file(name, text)).into());
    let mut count = 0;
    device.refresh_on_select(
        "now",
        Box::new(move || {
            count += 1;
            format!("{count:04}").into_bytes()
        }),
    );
    let select = |device: &mut FwCfg, selector: u16| -> [u8; 4] {
        device.write(0, &selector.to_le_bytes());
        let mut bytes = [0; 4];
        device.read(1, &mut bytes);
        bytes
    };
    assert_eq!(&select(&mut device, 0x20), b"aaaa");
    assert_eq!(&select(&mut device, 0x21), b"0001");
    assert_eq!(&select(&mut device, 0x21), b"0002");
    device.refresh_on_select("now", Box::new(|| b"too long".to_vec()));
    assert_eq!(
        &select(&mut device, 0x21),
        b"0002",
        "the length is promised"
    );
    assert_eq!(&select(&mut device, 0x22), b"zzzz");
}

#[test]
fn replacing_files_changes_their_lengths_and_no_other_file() {
    let (mut device, _) = two_files();
    select(&mut device, 0x21);
    read(&mut device, 4);
    device
        .replace(vec![file(
            "opt/jiffy/config",
            b"longer than what was there",
        )])
        .unwrap();
    assert_eq!(read(&mut device, 4), b"QEMU", "nothing is half read");
    let saved = device.save();
    let contents = |name: &str| {
        let file = saved.files.iter().find(|file| file.name == name);
        file.unwrap().contents.clone()
    };
    assert_eq!(contents("opt/jiffy/config"), b"longer than what was there");
    assert_eq!(contents("opt/another"), [7; 300]);
    select(&mut device, 0x19);
    let directory = read(&mut device, 4 + 2 * 64);
    let sizes: Vec<u32> = directory[4..]
        .chunks(64)
        .map(|entry| u32::from_be_bytes(entry[..4].try_into().unwrap()))
        .collect();
    assert_eq!(sizes, [300, 26], "by name");
    assert!(device.replace(vec![file("", b"")]).is_err());
}
