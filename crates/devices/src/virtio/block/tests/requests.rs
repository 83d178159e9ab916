use super::driver::*;
use crate::virtio::block::{Block, SECTOR};
use crate::virtio::device::VirtioDevice;
use crate::virtio::testing::Buffer;
use crate::write_log::WriteLog;
use std::os::unix::fs::MetadataExt;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_WRITE_ZEROES,
};
use vm_memory::GuestMemoryBackend as _;

#[test]
fn a_read_returns_the_files_bytes() {
    let disk = Fixture::new(16);
    let mut guest = Guest::start(&disk.options());
    assert_eq!(guest.read(3, 1024), (OK, 1025));
    assert_eq!(guest.load(DATA, 512), [3; 512]);
    assert_eq!(guest.load(DATA + 512, 512), [4; 512]);
    assert_eq!(guest.load(DATA + 1024, 1), [0], "and no more");
    assert_eq!(
        guest
            .device
            .interrupt
            .wait(|c| c.used_buffers == 1)
            .needs_reset,
        0
    );
}

#[test]
fn pages_written_by_a_request_are_in_the_dirty_log() {
    let disk = Fixture::new(16);
    let mut guest = Guest::start(&disk.options());
    let memory = guest.memory.clone();
    let log = WriteLog::of(memory.iter().next().unwrap());
    let pages = |log: &WriteLog| -> Vec<usize> {
        let words = log.take();
        let is_set = |page: &usize| words[page / 64] >> (page % 64) & 1 == 1;
        (0..words.len() * 64).filter(is_set).collect()
    };
    let used_ring = 1;
    let [status, data] = [STATUS, DATA].map(|address| address as usize / 4096);
    guest.write_header(IN, 3);
    guest
        .driver
        .add(&usual(&[Buffer::writable(DATA + 4090, 512)]));
    log.keep();
    guest.device.ring(0);
    guest.driver.wait_used();
    assert_eq!(pages(log), [used_ring, status, data, data + 1]);

    guest.write_header(OUT, 3);
    guest.driver.add(&usual(&[Buffer::readable(DATA, 512)]));
    pages(log);
    guest.device.ring(0);
    guest.driver.wait_used();
    assert_eq!(pages(log), [used_ring, status]);
}

#[test]
fn a_write_reaches_the_file_and_is_read_back() {
    let disk = Fixture::new(16);
    let mut guest = Guest::start(&disk.options());
    assert_eq!(guest.write(5, &[0xab; 512]), (OK, 1));
    assert_eq!(disk.bytes(5 * SECTOR, 512), [0xab; 512]);
    assert_eq!(disk.bytes(6 * SECTOR, 512), [6; 512]);
    assert_eq!(guest.request(FLUSH, 0, &[]), (OK, 1));
    guest.read(5, 512);
    assert_eq!(guest.load(DATA, 512), [0xab; 512]);
}

#[test]
fn buffers_may_be_split_anywhere() {
    let disk = Fixture::new(16);
    let mut guest = Guest::start(&disk.options());
    guest.write_header(IN, 2);
    let used = guest.send(&[
        Buffer::readable(HEADER, 5),
        Buffer::readable(HEADER + 5, 0),
        Buffer::readable(HEADER + 5, 11),
        Buffer::writable(DATA, 1),
        Buffer::writable(DATA + 1, 1000),
        // The last data bytes and the status in one buffer.
        Buffer::writable(DATA + 1001, 24),
    ]);
    assert_eq!(used.length, 1025);
    assert_eq!(guest.load(DATA + 511, 2), [2, 3]);
    assert_eq!(guest.load(DATA + 1023, 2), [3, OK]);

    // Header and data in one buffer.
    guest.write_header(OUT, 9);
    guest.driver.store(HEADER + 16, &[0x77; 512]);
    let whole = Buffer::readable(HEADER, 16 + 512);
    guest.send(&[whole, Buffer::writable(STATUS, 1)]);
    assert_eq!(guest.status(), OK);
    assert_eq!(disk.bytes(9 * SECTOR, 512), [0x77; 512]);
}

#[test]
fn an_indirect_table_is_followed() {
    let disk = Fixture::new(16);
    let mut guest = Guest::start(&disk.options());
    guest.write_header(IN, 1);
    let data: Vec<Buffer> = (0..126)
        .map(|n| Buffer::writable(DATA + n * 64, if n < 120 { 64 } else { 0 }))
        .collect();
    guest.driver.add_indirect(0xa000, &usual(&data));
    guest.device.ring(0);
    assert_eq!(guest.driver.wait_used().length, 120 * 64 + 1);
    assert_eq!(guest.load(DATA, 1), [1]);
    assert_eq!(guest.load(DATA + 14 * 512, 1), [15]);
}

#[test]
fn requests_past_the_end_of_the_disk_fail() {
    let disk = Fixture::new(16);
    let mut guest = Guest::start(&disk.options());
    assert_eq!(guest.config(0, 8), 16);
    assert_eq!(guest.read(15, 512), (OK, 513));
    assert_eq!(guest.read(16, 512), (IO_ERROR, 1));
    assert_eq!(guest.read(15, 1024), (IO_ERROR, 1));
    assert_eq!(guest.read(16, 0), (OK, 1), "a read of no bytes succeeds");
    assert_eq!(guest.write(16, &[1; 512]).0, IO_ERROR);
    for sector in [u64::MAX, u64::MAX / 512, 1 << 55, u64::MAX / 512 + 1] {
        assert_eq!(guest.read(sector, 512), (IO_ERROR, 1), "{sector:#x}");
        assert_eq!(guest.write(sector, &[1; 512]).0, IO_ERROR);
    }
    assert_eq!(std::fs::metadata(&disk.path).unwrap().len(), 16 * SECTOR);
}

#[test]
fn partial_sectors_are_refused() {
    let disk = Fixture::new(16);
    let mut guest = Guest::start(&disk.options());
    assert_eq!(guest.read(0, 511), (IO_ERROR, 1));
    assert_eq!(guest.write(0, &[1; 513]).0, IO_ERROR);
    assert_eq!(disk.bytes(0, 1024)[..512], [0; 512]);
}

#[test]
fn the_serial_number_is_padded_or_truncated() {
    let disk = Fixture::new(16);
    let mut guest = Guest::start(&disk.options());
    assert_eq!(
        guest.request(GET_ID, 0, &[Buffer::writable(DATA, 20)]),
        (OK, 21)
    );
    assert_eq!(&guest.load(DATA, 20), b"disk-1\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
    guest.driver.store(DATA, &[0xee; 20]);
    assert_eq!(
        guest.request(GET_ID, 0, &[Buffer::writable(DATA, 3)]),
        (OK, 4)
    );
    assert_eq!(guest.load(DATA, 4), b"dis\xee");
    assert_eq!(guest.request(GET_ID, 0, &[]), (OK, 1));
}

#[test]
fn a_discard_frees_blocks() {
    let disk = Fixture::new(64);
    let mut guest = Guest::start(&disk.options());
    let before = std::fs::metadata(&disk.path).unwrap().blocks();
    assert_eq!(guest.zero(DISCARD, &[(8, 8, 0), (32, 16, 0)]), (OK, 1));
    assert_eq!(disk.bytes(8 * SECTOR, 4096), [0; 4096]);
    assert_eq!(disk.bytes(32 * SECTOR, 8192), [0; 8192]);
    assert_eq!(disk.bytes(7 * SECTOR, 512), [7; 512]);
    assert_eq!(disk.bytes(16 * SECTOR, 512), [16; 512]);
    let after = std::fs::metadata(&disk.path).unwrap();
    assert!(after.blocks() < before);
    assert_eq!(after.len(), 64 * SECTOR);
}

#[test]
fn zeroes_are_written_with_and_without_unmap() {
    let disk = Fixture::new(64);
    let mut guest = Guest::start(&disk.options());
    assert_eq!(guest.zero(WRITE_ZEROES, &[(1, 2, 0), (8, 8, 1)]), (OK, 1));
    assert_eq!(disk.bytes(SECTOR, 1024), [0; 1024]);
    assert_eq!(disk.bytes(8 * SECTOR, 4096), [0; 4096]);
    assert_eq!(disk.bytes(3 * SECTOR, 512), [3; 512]);
    assert_eq!(disk.bytes(16 * SECTOR, 512), [16; 512]);
}

#[test]
fn discard_and_zeroes_have_the_limits_of_the_configuration() {
    let disk = Fixture::new(64);
    let mut guest = Guest::start(&disk.options());
    let (discard_most, ranges_most) = (guest.config(36, 4) as u32, guest.config(40, 4) as usize);
    let zeroes_most = guest.config(48, 4) as u32;
    assert_eq!(guest.zero(DISCARD, &vec![(0, 1, 0); ranges_most]), (OK, 1));
    let too_many = vec![(0, 1, 0); ranges_most + 1];
    for (kind, ranges) in [
        (DISCARD, too_many.clone()),
        (WRITE_ZEROES, too_many),
        (DISCARD, vec![]),
        (DISCARD, vec![(0, discard_most + 1, 0)]),
        (WRITE_ZEROES, vec![(0, zeroes_most + 1, 0)]),
        (DISCARD, vec![(63, 2, 0)]),
        (WRITE_ZEROES, vec![(64, 1, 0)]),
        (DISCARD, vec![(u64::MAX, 1, 0)]),
        (WRITE_ZEROES, vec![(u64::MAX / 512, u32::MAX, 0)]),
    ] {
        assert_eq!(guest.zero(kind, &ranges), (IO_ERROR, 1), "{ranges:?}");
    }
    for (kind, flags) in [
        (DISCARD, 1),
        (DISCARD, 2),
        (WRITE_ZEROES, 2),
        (WRITE_ZEROES, 3),
    ] {
        assert_eq!(guest.zero(kind, &[(0, 1, flags)]), (UNSUPPORTED, 1));
    }
    assert_eq!(guest.zero(DISCARD, &[(0, 0, 0)]), (OK, 1));
    assert_eq!(disk.bytes(63 * SECTOR, 512), [63; 512]);
}

#[test]
fn unknown_kinds_are_unsupported() {
    let disk = Fixture::new(16);
    let mut guest = Guest::start(&disk.options());
    for kind in [2, 3, 5, 14, 16, 26, 0x8000_0000, u32::MAX] {
        assert_eq!(guest.request(kind, 0, &[]), (UNSUPPORTED, 1), "{kind}");
    }
}

#[test]
fn a_read_only_disk_refuses_all_but_reads() {
    let disk = Fixture::new(16);
    let mut options = disk.options();
    options.read_only = true;
    let mut guest = Guest::start(&options);
    let features = guest.device.device.features();
    assert_ne!(features & 1 << VIRTIO_BLK_F_RO, 0);
    for bit in [
        VIRTIO_BLK_F_FLUSH,
        VIRTIO_BLK_F_DISCARD,
        VIRTIO_BLK_F_WRITE_ZEROES,
    ] {
        assert_eq!(features & 1 << bit, 0);
    }
    assert_eq!(guest.read(1, 512), (OK, 513));
    assert_eq!(guest.write(1, &[9; 512]), (IO_ERROR, 1));
    assert_eq!(guest.zero(DISCARD, &[(0, 8, 0)]), (IO_ERROR, 1));
    assert_eq!(guest.zero(WRITE_ZEROES, &[(0, 8, 0)]), (IO_ERROR, 1));
    assert_eq!(guest.request(FLUSH, 0, &[]), (OK, 1));
    assert_eq!(disk.bytes(SECTOR, 512), [1; 512]);
}

#[test]
fn direct_io_serves_aligned_and_unaligned_buffers() {
    // In the test program's folder, because /tmp may be a file system without direct I/O.
    let here = tempfile::tempdir_in(std::env::current_exe().unwrap().parent().unwrap()).unwrap();
    let disk = Fixture::within(here, 4096);
    let mut options = disk.options();
    options.direct = true;
    if Block::open(&options).is_err() {
        eprintln!("skipped: no direct I/O on this file system");
        return;
    }
    let mut guest = Guest::start(&options);
    let block = guest.config(20, 4);
    let sectors = (block / SECTOR) as u8;
    for misaligned in [0, 8, 1] {
        let first = 8 + u64::from(sectors);
        let data = [Buffer::writable(DATA + misaligned, 0x40000)];
        assert_eq!(guest.request(IN, first, &data), (OK, 0x40001));
        assert_eq!(guest.load(DATA + misaligned, 1), [first as u8]);
        let last = guest.load(DATA + misaligned + 0x40000 - 1, 1);
        assert_eq!(last, [(first + 511) as u8], "all of it");
        let text = vec![0xa0 + misaligned as u8; block as usize];
        guest.driver.store(DATA + misaligned, &text);
        let data = [Buffer::readable(DATA + misaligned, block as u32)];
        assert_eq!(guest.request(OUT, 8, &data), (OK, 1));
        assert_eq!(disk.bytes(8 * SECTOR, block as usize), text);
    }
    if block > SECTOR {
        assert_eq!(guest.read(1, 512), (IO_ERROR, 1));
    }
}

#[test]
fn every_request_of_a_flood_is_answered_once() {
    let disk = Fixture::new(16);
    for features in [FLUSHES, FLUSHES | EVENT_IDX] {
        let mut guest = Guest::with_features(&disk.options(), features);
        let mut answered = 0;
        let mut sent = 0;
        guest.write_header(IN, 4);
        while answered < 5000 {
            while sent - answered < 21 && sent < 5000 {
                // Three of the 64 descriptors each.
                guest.driver.add(&usual(&[Buffer::writable(DATA, 512)]));
                guest.device.ring(0);
                sent += 1;
            }
            assert_eq!(guest.driver.wait_used().length, 513);
            answered += 1;
            guest.driver.set_used_event(answered as u16);
        }
        assert_eq!(guest.driver.used_index(), 5000);
        assert_eq!(guest.driver.next_used(), None);
    }
}

#[test]
fn event_idx_suppresses_interrupts_that_the_driver_did_not_ask_for() {
    let disk = Fixture::new(16);
    let mut guest = Guest::with_features(&disk.options(), FLUSHES | EVENT_IDX);
    guest.driver.set_used_event(2);
    for _ in 0..2 {
        assert_eq!(guest.read(0, 512).0, OK);
    }
    assert_eq!(guest.device.interrupt.counts().used_buffers, 0);
    guest.read(0, 512);
    guest
        .device
        .interrupt
        .wait(|counts| counts.used_buffers == 1);
}

#[test]
fn a_driver_that_wants_no_interrupts_gets_none() {
    let disk = Fixture::new(16);
    let mut guest = Guest::start(&disk.options());
    guest.driver.set_avail_flags(1);
    guest.read(0, 512);
    let interrupt = guest.device.interrupt.clone();
    guest.device.stop();
    assert_eq!(interrupt.counts().used_buffers, 0);
}

#[test]
fn reads_past_the_end_of_a_truncated_file_fail() {
    let disk = Fixture::new(16);
    let mut guest = Guest::start(&disk.options());
    std::fs::OpenOptions::new()
        .write(true)
        .open(&disk.path)
        .unwrap()
        .set_len(8 * SECTOR)
        .unwrap();
    assert_eq!(guest.read(8, 512), (IO_ERROR, 1));
    assert_eq!(guest.read(7, 512), (OK, 513));
}
