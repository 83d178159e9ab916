use super::*;
use crate::virtio::testing::{Buffer, DriverQueue, Running as Device, copy_of, memory};
use proptest::prelude::*;

const MEMORY_BYTES: usize = 0x40000;
const RINGS: u64 = 0x1000;
const DATA: u64 = 0x4000;

fn start() -> (Device<Entropy>, DriverQueue) {
    let memory = memory(MEMORY_BYTES);
    let driver = DriverQueue::new(memory.clone(), RINGS, QUEUE_SIZE);
    let queue = driver.device_queue(false);
    (
        Device::start(Entropy::new(), &memory, vec![queue], 0),
        driver,
    )
}

fn load(driver: &DriverQueue, address: u64, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    driver.load(address, &mut bytes);
    bytes
}

#[test]
fn each_request_gets_different_random_bytes() {
    let (mut device, mut driver) = start();
    let mut seen = Vec::new();
    for _ in 0..3 {
        let head = driver.add(&[Buffer::writable(DATA, 32), Buffer::writable(DATA + 100, 32)]);
        device.ring(0);
        let used = driver.next_used().unwrap();
        assert_eq!((used.head, used.length), (u32::from(head), 64));
        assert_eq!(load(&driver, DATA + 32, 4), [0; 4], "not past the buffer");
        seen.push((load(&driver, DATA, 32), load(&driver, DATA + 100, 32)));
    }
    assert_ne!(seen[0], seen[1]);
    assert_ne!(seen[1], seen[2]);
    assert_eq!(device.interrupt.counts().used_buffers, 3);
}

#[test]
fn a_large_request_is_answered_in_part() {
    let (mut device, mut driver) = start();
    driver.add(&[Buffer::writable(DATA, 0x20000)]);
    device.ring(0);
    assert_eq!(driver.next_used().unwrap().length, REQUEST_BYTES_MAX as u32);
    assert_eq!(load(&driver, DATA + REQUEST_BYTES_MAX as u64, 8), [0; 8]);
}

#[test]
fn malformed_requests_are_filled_as_far_as_possible() {
    let (mut device, mut driver) = start();
    let outside = MEMORY_BYTES as u64;
    for (buffers, written) in [
        (vec![Buffer::readable(DATA, 16)], 0),
        (vec![Buffer::writable(DATA, 0)], 0),
        (vec![Buffer::writable(outside, 16)], 0),
        (vec![Buffer::writable(u64::MAX - 3, 16)], 0),
        (
            vec![Buffer::readable(DATA, 4), Buffer::writable(DATA, 4)],
            4,
        ),
        (
            vec![Buffer::writable(DATA, 4), Buffer::writable(outside, 4)],
            4,
        ),
    ] {
        driver.add(&buffers);
        device.ring(0);
        assert_eq!(driver.next_used().unwrap().length, written, "{buffers:?}");
    }
}

#[test]
fn a_driver_that_wants_no_interrupt_gets_none() {
    let (mut device, mut driver) = start();
    driver.set_avail_flags(1);
    driver.add(&[Buffer::writable(DATA, 8)]);
    device.ring(0);
    assert_eq!(driver.next_used().unwrap().length, 8);
    assert_eq!(device.interrupt.counts().used_buffers, 0);
}

#[test]
fn an_impossible_ring_needs_a_reset() {
    let (mut device, driver) = start();
    driver.set_avail_index(QUEUE_SIZE + 1);
    device.ring(0);
    assert_eq!(device.interrupt.counts().needs_reset, 1);
}

#[test]
fn a_head_outside_the_table_needs_a_reset() {
    let (mut device, mut driver) = start();
    driver.offer(QUEUE_SIZE);
    device.ring(0);
    assert_eq!(device.interrupt.counts().needs_reset, 1);
    assert_eq!(driver.next_used(), None);
}

#[test]
fn requests_left_waiting_are_answered_once_after_a_restore() {
    let (device, mut driver) = start();
    driver.add(&[Buffer::writable(DATA, 8)]);
    driver.add(&[Buffer::writable(DATA + 8, 8)]);
    // The device was not notified yet.
    let (entropy, queues) = device.stop();
    let state = entropy.save();

    let memory = copy_of(driver.memory());
    let restored = Entropy::restore(&state);
    assert_eq!(restored.save(), state);
    let mut device = Device::start(restored, &memory, queues, 0);
    let mut driver = driver.over(memory);
    assert_eq!(driver.next_used().unwrap().length, 8);
    assert_eq!(driver.next_used().unwrap().length, 8);
    device.ring(0);
    assert_eq!(driver.next_used(), None);
}

proptest! {
    #[test]
    fn any_descriptors_are_survived(
        table in proptest::collection::vec((prop_oneof![0..MEMORY_BYTES as u64, any::<u64>()], prop_oneof![0u32..5000, any::<u32>()], 0u16..8, 0u16..16), QUEUE_SIZE as usize),
        heads in proptest::collection::vec(0u16..12, 1..8),
    ) {
        let (mut device, mut driver) = start();
        for (index, (address, length, flags, next)) in (0u16..).zip(table) {
            // Keeps buffers off the rings, which the next test needs.
            let address = if address < DATA { address + DATA } else { address };
            driver.write_descriptor(RINGS, index, Buffer::readable(address, length), flags, next);
        }
        for head in &heads {
            driver.offer(*head);
        }
        device.ring(0);
        let broken = heads.iter().any(|head| *head >= QUEUE_SIZE);
        prop_assert_eq!(device.interrupt.counts().needs_reset > 0, broken);
        if !broken {
            prop_assert_eq!(usize::from(driver.used_index()), heads.len());
        }
    }
}
