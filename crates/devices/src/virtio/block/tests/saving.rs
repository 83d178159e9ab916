use super::driver::*;
use crate::virtio::block::{Block, BlockOptions, BlockState, RestoreError, SECTOR};
use crate::virtio::queue::RateLimit;
use crate::virtio::testing::{Buffer, Running, copy_of};
use jiffy_sys::memfd::{self, Pages};
use std::collections::BTreeSet;
use std::num::NonZeroU64;
use std::os::fd::AsRawFd;
use std::thread;
use std::time::Duration;

#[test]
fn requests_left_waiting_are_done_exactly_once_after_a_restore() {
    let disk = Fixture::new(64);
    let mut guest = Guest::start(&disk.options());
    assert_eq!(guest.read(0, 512).0, OK);

    // Twenty writes, some of which the device may take: it is stopped right after the notification.
    let mut heads = BTreeSet::new();
    for n in 0..20u64 {
        let (header, data, status) = (0xb000 + n * 16, DATA + n * 512, 0xc000 + n);
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&OUT.to_le_bytes());
        bytes[8..].copy_from_slice(&(n + 10).to_le_bytes());
        guest.driver.store(header, &bytes);
        guest.driver.store(data, &[0x80 + n as u8; 512]);
        guest.driver.store(status, &[UNTOUCHED]);
        heads.insert(u32::from(guest.driver.add(&[
            Buffer::readable(header, 16),
            Buffer::readable(data, 512),
            Buffer::writable(status, 1),
        ])));
    }
    guest.device.ring(0);
    let (block, queues) = guest.device.stop();
    let done_before = guest.driver.used_index();
    assert_eq!(queues[0].state().next_used, done_before);
    assert_eq!(
        queues[0].state().next_avail,
        done_before,
        "what was taken was answered"
    );
    let saved = serde_json::to_string(&block.save()).unwrap();
    drop(block);
    let state: BlockState = serde_json::from_str(&saved).unwrap();

    let memory = copy_of(&guest.memory);
    let block = Block::restore(&disk.options(), &state).unwrap();
    assert_eq!(block.save(), state);
    let device = Running::start(block, &memory, queues, FLUSHES);
    let mut driver = guest.driver.over(memory);
    for _ in 0..20 {
        let used = driver.wait_used();
        assert!(
            heads.remove(&used.head),
            "head {} was used twice",
            used.head
        );
    }
    let (_, queues) = device.stop();
    assert_eq!(driver.next_used(), None);
    assert_eq!(queues[0].state().next_avail, 21);
    for n in 0..20 {
        let mut status = [0];
        driver.load(0xc000 + n, &mut status);
        assert_eq!(status, [OK]);
        assert_eq!(disk.bytes((n + 10) * SECTOR, 512), [0x80 + n as u8; 512]);
    }
}

#[test]
fn a_disk_that_changed_is_refused() {
    let disk = Fixture::new(8);
    let state = Block::open(&disk.options()).unwrap().save();
    assert!(Block::restore(&disk.options(), &state).is_ok());

    let refused = |options: &BlockOptions, state: &_| match Block::restore(options, state) {
        Err(RestoreError::Changed { what, .. }) => what,
        other => panic!("{other:?}"),
    };
    let mut options = disk.options();
    options.id = "another".into();
    assert_eq!(refused(&options, &state), "serial number");
    let mut options = disk.options();
    options.read_only = true;
    assert_eq!(refused(&options, &state), "writability");
    let mut other = state.clone();
    other.bytes += SECTOR;
    assert_eq!(refused(&disk.options(), &other), "size");
    let mut other = state.clone();
    other.block_size = 4096;
    assert_eq!(refused(&disk.options(), &other), "block size");
    std::fs::remove_file(&disk.path).unwrap();
    assert!(matches!(
        Block::restore(&disk.options(), &state),
        Err(RestoreError::Open(_))
    ));
}

#[test]
fn a_device_stops_in_the_middle_of_a_flood() {
    let disk = Fixture::new(64);
    let mut guest = Guest::start(&disk.options());
    guest.write_header(IN, 0);
    for _ in 0..21 {
        guest.driver.add(&usual(&[Buffer::writable(DATA, 0x4000)]));
    }
    guest.device.ring(0);
    let (_, queues) = guest.device.stop();
    let state = queues[0].state();
    assert_eq!(state.next_avail, state.next_used);
    assert!(state.next_used <= 21);
}

#[test]
fn a_new_limit_applies_to_a_waiting_request() {
    let disk = Fixture::new(8);
    let mut options = disk.options();
    // The cost of the first read takes ten minutes to pay off.
    options.limit.bytes_per_second = NonZeroU64::new(1);
    let mut guest = Guest::start(&options);
    assert_eq!(guest.read(0, 512), (OK, 513));
    guest.write_header(IN, 3);
    guest.driver.add(&usual(&[Buffer::writable(DATA, 512)]));
    guest.device.ring(0);
    guest.device.device.set_limit(RateLimit::default());
    assert_eq!(guest.driver.wait_used().length, 513);
}

#[test]
fn zeros_that_are_written_for_the_file_system_count_for_the_limit() {
    // A memfd's file system can release ranges, but not zero them in another way.
    let file = memfd::create("disk", 64 * SECTOR, Pages::Small).unwrap();
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let mut options = options(path.as_ref());
    options.limit.bytes_per_second = NonZeroU64::new(1);
    let mut guest = Guest::start(&options);
    let is_answered = |guest: &mut Guest| {
        guest.write_header(IN, 3);
        guest.driver.add(&usual(&[Buffer::writable(DATA, 512)]));
        guest.device.ring(0);
        thread::sleep(Duration::from_millis(200));
        guest.status() == OK
    };
    assert_eq!(guest.zero(WRITE_ZEROES, &[(1, 2, 1)]), (OK, 1));
    assert_eq!(guest.zero(WRITE_ZEROES, &[(0, 64, 0)]), (OK, 1));
    assert!(!is_answered(&mut guest), "the zeros cost half a day");
    guest.device.device.set_limit(RateLimit::default());
    assert_eq!(guest.driver.wait_used().length, 513);
    guest.device.device.set_limit(options.limit);
    assert_eq!(guest.zero(WRITE_ZEROES, &[(0, 64, 1)]), (OK, 1));
    assert!(is_answered(&mut guest), "nothing was written");
}

#[test]
fn a_request_that_waits_for_the_limit_survives_a_stop() {
    let disk = Fixture::new(8);
    let mut options = disk.options();
    // The cost of the first read takes ten minutes to pay off.
    options.limit.bytes_per_second = NonZeroU64::new(1);
    let mut guest = Guest::start(&options);
    assert_eq!(guest.read(0, 512), (OK, 513));
    guest.write_header(IN, 3);
    guest.driver.add(&usual(&[Buffer::writable(DATA, 512)]));
    guest.device.ring(0);
    let (block, queues) = guest.device.stop();
    let state = queues[0].state();
    assert_eq!((state.next_avail, state.next_used), (1, 1));
    let saved = block.save();
    drop(block);

    let block = Block::restore(&disk.options(), &saved).unwrap();
    let _device = Running::start(block, &guest.memory, queues, FLUSHES);
    let used = guest.driver.wait_used();
    assert_eq!(used.length, 513);
    let mut data = [0; 512];
    guest.driver.load(DATA, &mut data);
    assert_eq!(data, [3; 512]);
}
