//! Requests of many megabytes, which a guest can build from little memory.

use super::driver::*;
use crate::virtio::block::disk::{Disk, PIECE_BYTES, Scratch};
use crate::virtio::queue::segment::Segment;
use crate::virtio::testing::{Buffer, Running, TIMEOUT, memory};
use std::fs::File;
use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;
use tempfile::TempDir;
use vm_memory::{Bytes, GuestAddress};

const DISK_BYTES: u64 = 64 << 20;
/// Addresses of an indirect table and of the largest data area.
const TABLE: u64 = 0xa000;
const DATA_BYTES: u32 = (MEMORY_BYTES - DATA) as u32;

fn empty_disk() -> Fixture {
    // In the test program's folder, because /tmp may be a file system without direct I/O.
    let program = std::env::current_exe().unwrap();
    let folder = TempDir::new_in(program.parent().unwrap()).unwrap();
    let disk = Fixture::within(folder, 1);
    let file = File::options().write(true).open(&disk.path).unwrap();
    file.set_len(DISK_BYTES).unwrap();
    disk
}

/// Bytes in which no two pieces are equal.
fn noise(length: usize) -> Vec<u8> {
    let mut state = 0x1234_5678_9abc_def1u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..length).map(|_| next()).collect()
}

#[test]
fn a_request_larger_than_a_piece_moves_each_byte_once() {
    for (direct, odd) in [(false, 700), (true, 700), (true, 512)] {
        let disk = empty_disk();
        let mut options = disk.options();
        options.direct = direct;
        // Not every file system supports direct I/O.
        let Ok(_) = crate::virtio::block::Block::open(&options) else {
            continue;
        };
        let mut guest = Guest::start(&options);
        let contents = noise(DATA_BYTES as usize);
        guest.driver.store(DATA, &contents);
        // Buffers that overlap, and begin and end at any byte, except the last.
        let mut data = Vec::new();
        let mut expected = Vec::new();
        for n in 0..24 {
            let (start, end) = (n * odd, DATA_BYTES as usize - n * odd);
            data.push(Buffer::readable(DATA + start as u64, (end - start) as u32));
            expected.extend_from_slice(&contents[start..end]);
        }
        let rest = expected.len().next_multiple_of(4096) - expected.len();
        data.push(Buffer::readable(DATA, rest as u32));
        expected.extend_from_slice(&contents[..rest]);
        assert!(expected.len() > 2 * PIECE_BYTES);
        assert_eq!(guest.request(OUT, 8, &data), (OK, 1));
        assert!(disk.bytes(4096, expected.len()) == expected, "{direct}");
        assert_eq!(disk.bytes(4096 + expected.len() as u64, 8), [0; 8]);

        // Reads them back; where buffers overlap, the last one wins.
        for buffer in &mut data {
            buffer.writable = true;
        }
        let (status, length) = guest.request(IN, 8, &data);
        assert_eq!((status, length as usize), (OK, expected.len() + 1));
        let tail = &expected[expected.len() - rest..];
        assert_eq!(guest.load(DATA, rest), tail);
        // In the rest of the data, the innermost buffer was the last.
        let (start, end) = (23 * odd, DATA_BYTES as usize - 23 * odd);
        let inner = expected.len() - rest - (end - start);
        let from = start.max(rest);
        assert!(
            guest.load(DATA + from as u64, end - from)
                == expected[inner + from - start..expected.len() - rest]
        );
    }
}

#[test]
fn a_stop_interrupts_a_large_transfer_between_pieces() {
    let disk = empty_disk();
    let opened = Disk::open(&disk.options()).unwrap();
    let memory = memory(1 << 20);
    memory.write_slice(&[7; 4096], GuestAddress(0)).unwrap();
    let megabyte = Segment {
        address: GuestAddress(0),
        length: 1 << 20,
    };
    let mut scratch = Scratch::new(Arc::new(AtomicBool::new(true)));
    let small = [megabyte; 4];
    let large = [megabyte; 5];
    opened
        .write(&mut scratch, &memory, &small, 0, 4 << 20)
        .expect("one piece is finished");
    for result in [
        opened.read(&mut scratch, &memory, &large, 0, 5 << 20),
        opened.write(&mut scratch, &memory, &large, 0, 5 << 20),
    ] {
        assert_eq!(result.unwrap_err().kind(), ErrorKind::Interrupted);
    }
}

#[test]
fn a_request_interrupted_by_a_pause_is_done_after_it() {
    let disk = empty_disk();
    let mut guest = Guest::start(&disk.options());
    guest.driver.store(DATA, &vec![0xab; DATA_BYTES as usize]);
    guest.write_header(OUT, 0);
    // 52 MiB, from 448 KiB of memory.
    let bytes = 120 * DATA_BYTES as usize;
    let data = [Buffer::readable(DATA, DATA_BYTES); 120];
    let head = guest.driver.add_indirect(TABLE, &usual(&data));
    guest.device.ring(0);
    let start = Instant::now();
    // Stops it after it has begun.
    while disk.bytes(0, 1) != [0xab] {
        assert!(start.elapsed() < TIMEOUT);
    }
    let (block, queues) = guest.device.stop();
    let finished = guest.driver.used_index();
    assert_eq!(queues[0].state().next_avail, finished);
    assert_eq!(queues[0].state().next_used, finished);
    if finished == 0 {
        assert_eq!(guest.driver.next_used(), None);
        let mut status = [0];
        guest.driver.load(STATUS, &mut status);
        assert_eq!(status, [UNTOUCHED], "not answered yet");
    }
    let device = Running::start(block, &guest.memory, queues, FLUSHES);
    let used = guest.driver.wait_used();
    assert_eq!((used.head, used.length), (u32::from(head), 1));
    device.stop();
    assert_eq!(guest.driver.next_used(), None, "answered once");
    let mut status = [0];
    guest.driver.load(STATUS, &mut status);
    assert_eq!(status, [OK]);
    assert!(disk.bytes(0, bytes).iter().all(|byte| *byte == 0xab));
}
