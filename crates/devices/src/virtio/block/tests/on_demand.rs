//! Disks whose file is filled on demand.

use super::driver::*;
use crate::virtio::block::{Block, BlockOptions, Fetched, Fetcher, Residency, SECTOR};
use crate::virtio::queue::doorbell::descriptor;
use crate::virtio::testing::{Buffer, DriverQueue, Running, copy_of, memory};
use rustix::event::{PollFd, PollFlags, poll};
use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use vmm_sys_util::eventfd::EventFd;

const TIMEOUT: Duration = Duration::from_secs(60);

/// Which sectors are present, and how requests for others are answered.
#[derive(Debug)]
struct Map {
    path: PathBuf,
    present: Mutex<Vec<bool>>,
    asked: Mutex<Sender<Range<u64>>>,
    mode: Mutex<Mode>,
    fetches: Mutex<Fetches>,
    /// Readable when there are answers.
    news: EventFd,
}

#[derive(Debug, Default)]
struct Fetches {
    last: u64,
    /// Requests that are answered only when the test says so.
    held: Vec<(u64, Range<u64>)>,
    answers: Vec<(u64, io::Result<Fetched>)>,
}

#[derive(Debug, Clone, Copy)]
enum Mode {
    Fill,
    Fail,
    /// The file has no space: this many sectors are returned as bytes.
    Bring(usize),
    /// The same for the first request; later ones are written to the file.
    BringOnce(usize),
    /// Requests are answered when the test says so.
    Hold,
}

impl Map {
    fn new(fixture: &Fixture, sectors: usize) -> (Arc<Map>, Receiver<Range<u64>>) {
        let (asked, heard) = channel();
        let map = Map {
            path: fixture.path.clone(),
            present: Mutex::new(vec![false; sectors]),
            asked: Mutex::new(asked),
            mode: Mutex::new(Mode::Fill),
            fetches: Mutex::default(),
            news: EventFd::new(libc::EFD_NONBLOCK).unwrap(),
        };
        (Arc::new(map), heard)
    }

    fn set_mode(&self, mode: Mode) {
        *self.mode.lock().unwrap() = mode;
    }

    fn fill(&self, bytes: &Range<u64>) {
        let file = OpenOptions::new().write(true).open(&self.path).unwrap();
        let sectors = Map::sectors(bytes);
        for sector in sectors.clone() {
            let bytes = [sector as u8 ^ 0xff; SECTOR as usize];
            file.write_all_at(&bytes, sector as u64 * SECTOR).unwrap();
        }
        self.present.lock().unwrap()[sectors].fill(true);
    }

    /// Answers the held requests that satisfy `which`.
    fn release(&self, which: impl Fn(&Range<u64>) -> bool) {
        let mut fetches = self.fetches.lock().unwrap();
        let held = std::mem::take(&mut fetches.held);
        for (ticket, bytes) in held {
            match which(&bytes) {
                true => {
                    self.fill(&bytes);
                    fetches.answers.push((ticket, Ok(Fetched::Present)));
                }
                false => fetches.held.push((ticket, bytes)),
            }
        }
        self.news.write(1).unwrap();
    }

    fn sectors(bytes: &Range<u64>) -> Range<usize> {
        (bytes.start / SECTOR) as usize..bytes.end.div_ceil(SECTOR) as usize
    }
}

impl Residency for Map {
    fn is_present(&self, bytes: &Range<u64>) -> bool {
        let present = self.present.lock().unwrap();
        present[Map::sectors(bytes)].iter().all(|there| *there)
    }

    fn fetcher(&self) -> Option<&dyn Fetcher> {
        Some(self)
    }
}

impl Fetcher for Map {
    fn ask(&self, bytes: Range<u64>) -> u64 {
        let mode = *self.mode.lock().unwrap();
        let mut fetches = self.fetches.lock().unwrap();
        fetches.last += 1;
        let ticket = fetches.last;
        let outcome = match mode {
            Mode::Bring(most) | Mode::BringOnce(most) => {
                if matches!(mode, Mode::BringOnce(_)) {
                    self.set_mode(Mode::Fill);
                }
                let sectors = Map::sectors(&bytes).take(most);
                let came = sectors.flat_map(|sector| [sector as u8 ^ 0xff; SECTOR as usize]);
                Some(Ok(Fetched::Bytes(came.collect())))
            }
            Mode::Fill => {
                self.fill(&bytes);
                Some(Ok(Fetched::Present))
            }
            Mode::Fail => Some(Err(io::Error::other("chunk 1 is not available"))),
            Mode::Hold => None,
        };
        match outcome {
            Some(outcome) => {
                fetches.answers.push((ticket, outcome));
                self.news.write(1).unwrap();
            }
            None => fetches.held.push((ticket, bytes.clone())),
        }
        drop(fetches);
        self.asked.lock().unwrap().send(bytes).unwrap();
        ticket
    }

    fn answers(&self) -> Vec<(u64, io::Result<Fetched>)> {
        let _ = self.news.read();
        std::mem::take(&mut self.fetches.lock().unwrap().answers)
    }

    fn wait(&self, wakeup: BorrowedFd<'_>) -> io::Result<bool> {
        let mut fds = [
            PollFd::from_borrowed_fd(wakeup, PollFlags::IN),
            PollFd::from_borrowed_fd(descriptor(&self.news), PollFlags::IN),
        ];
        poll(&mut fds, None)?;
        Ok(!fds[0].revents().is_empty())
    }

    fn give_up(&self) {
        let mut fetches = self.fetches.lock().unwrap();
        fetches.held.clear();
        fetches.answers.clear();
    }
}

fn start(fixture: &Fixture, map: &Arc<Map>) -> Guest {
    let memory = memory(MEMORY_BYTES as usize);
    let driver = DriverQueue::new(memory.clone(), RINGS, 64);
    let queue = driver.device_queue(false);
    let options = BlockOptions {
        read_only: true,
        ..fixture.options()
    };
    let block = Block::open(&options).unwrap().on_demand(map.clone());
    Guest {
        device: Running::start(block, &memory, vec![queue], FLUSHES),
        driver,
        memory,
    }
}

#[test]
fn missing_ranges_are_fetched_before_a_read() {
    let fixture = Fixture::new(64);
    let (map, asked) = Map::new(&fixture, 64);
    map.present.lock().unwrap()[8..16].fill(true);
    let mut guest = start(&fixture, &map);
    assert_eq!(guest.read(8, 8 * 512), (OK, 8 * 512 + 1));
    assert_eq!(guest.load(DATA, 512), [8; 512]);
    assert!(asked.try_recv().is_err(), "nothing was missing");
    // A range that is partly present is requested as a whole.
    assert_eq!(guest.read(15, 2 * 512), (OK, 2 * 512 + 1));
    assert_eq!(asked.try_recv().unwrap(), 15 * SECTOR..17 * SECTOR);
    assert_eq!(guest.load(DATA + 512, 512), [16 ^ 0xff; 512]);
    assert_eq!(guest.read(16, 512), (OK, 513));
    assert!(asked.try_recv().is_err(), "it is there now");
    // Bytes past the disk's end are not requested.
    assert_eq!(guest.read(64, 512).0, IO_ERROR);
    assert_eq!(guest.read(u64::MAX / 512, 512).0, IO_ERROR);
    assert!(asked.try_recv().is_err());
}

#[test]
fn a_failed_fetch_is_an_io_error_and_later_reads_work() {
    let fixture = Fixture::new(64);
    let (map, asked) = Map::new(&fixture, 64);
    map.present.lock().unwrap()[..8].fill(true);
    map.set_mode(Mode::Fail);
    let mut guest = start(&fixture, &map);
    assert_eq!(guest.read(20, 4096), (IO_ERROR, 1));
    assert_eq!(guest.read(0, 4096).0, OK);
    assert_eq!(guest.read(20, 4096), (IO_ERROR, 1), "requested again");
    assert_eq!(asked.try_iter().count(), 2);
    map.set_mode(Mode::Fill);
    assert_eq!(guest.read(20, 4096).0, OK);
    assert_eq!(guest.load(DATA, 512), [20 ^ 0xff; 512]);
}

#[test]
fn fetched_bytes_that_the_file_cannot_hold_go_to_the_guest() {
    let fixture = Fixture::new(64);
    let (map, asked) = Map::new(&fixture, 64);
    let mut guest = start(&fixture, &map);
    // The buffers do not end where answers end.
    let data = [
        Buffer::writable(DATA, 700),
        Buffer::writable(DATA + 700, 8 * 512 - 700),
    ];
    let expected: Vec<u8> = (16..24).flat_map(|sector| [sector ^ 0xff; 512]).collect();
    for (mode, questions) in [
        (Mode::Bring(3), 3),
        (Mode::Bring(8), 1),
        (Mode::BringOnce(3), 2),
    ] {
        map.set_mode(mode);
        guest.driver.store(DATA, &[0; 8 * 512]);
        assert_eq!(guest.request(IN, 16, &data), (OK, 8 * 512 + 1), "{mode:?}");
        assert_eq!(guest.load(DATA, 8 * 512), expected, "{mode:?}");
        assert_eq!(asked.try_iter().count(), questions, "{mode:?}");
    }
    // An empty answer is an error.
    map.present.lock().unwrap().fill(false);
    map.set_mode(Mode::Bring(0));
    assert_eq!(guest.read(16, 512), (IO_ERROR, 1));
}

#[test]
fn a_waiting_read_returns_to_the_ring_and_is_done_later() {
    let fixture = Fixture::new(64);
    let (map, asked) = Map::new(&fixture, 64);
    map.set_mode(Mode::Hold);
    let mut guest = start(&fixture, &map);
    guest.write_header(IN, 30);
    guest.driver.add(&usual(&[Buffer::writable(DATA, 4096)]));
    guest.device.ring(0);
    asked.recv_timeout(TIMEOUT).unwrap();
    // The doorbell is signalled for another reason meanwhile.
    guest.device.ring(0);
    let (block, queues) = guest.device.stop();
    assert_eq!(guest.driver.next_used(), None);
    assert_eq!(queues[0].state().next_avail, 0, "it is in the ring again");
    assert_eq!(guest.driver.used_index(), 0);

    map.set_mode(Mode::Fill);
    let device = Running::start(block, &guest.memory, queues, FLUSHES);
    guest.driver.wait_used();
    let mut status = [0];
    guest.driver.load(STATUS, &mut status);
    assert_eq!(status, [OK]);
    let mut bytes = [0; 512];
    guest.driver.load(DATA, &mut bytes);
    assert_eq!(bytes, [30 ^ 0xff; 512]);
    drop(device);
}

/// A pause may find a read that waits in the middle of a request of many pieces.
#[test]
fn large_reads_are_fetched_piece_by_piece() {
    let sectors = 24 << 11;
    let fixture = Fixture::new(1);
    let file = OpenOptions::new().write(true).open(&fixture.path).unwrap();
    file.set_len(sectors * SECTOR).unwrap();
    let (map, asked) = Map::new(&fixture, sectors as usize);
    let mut guest = start(&fixture, &map);
    // The same memory many times: 9 MiB.
    let data = vec![Buffer::writable(DATA, 256 << 10); 36];
    assert_eq!(guest.request(IN, 8, &data).0, OK);
    let asked: Vec<_> = asked.try_iter().collect();
    assert_eq!(asked.first().unwrap().start, 8 * SECTOR);
    assert_eq!(asked.last().unwrap().end, 8 * SECTOR + (9 << 20));
    assert!(asked.windows(2).all(|pair| pair[0].end == pair[1].start));
    assert!(asked.iter().all(|bytes| bytes.end - bytes.start <= 4 << 20));
}

/// Adds a read of one sector, with memory of its own, to the ring; returns its head.
fn add_read(guest: &mut Guest, sector: u64) -> u16 {
    let (header, data, status) = (0xb000 + sector * 16, DATA + sector * 512, 0xc000 + sector);
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&IN.to_le_bytes());
    bytes[8..].copy_from_slice(&sector.to_le_bytes());
    guest.driver.store(header, &bytes);
    guest.driver.store(status, &[UNTOUCHED]);
    guest.driver.add(&[
        Buffer::readable(header, 16),
        Buffer::writable(data, 512),
        Buffer::writable(status, 1),
    ])
}

fn expect_read(driver: &DriverQueue, sector: u64, byte: u8) {
    let (mut status, mut data) = ([0], [0; 512]);
    driver.load(0xc000 + sector, &mut status);
    driver.load(DATA + sector * 512, &mut data);
    assert_eq!((status, data), ([OK], [byte; 512]), "sector {sector}");
}

#[test]
fn a_present_read_overtakes_sixteen_waiting_ones() {
    let fixture = Fixture::new(64);
    let (map, asked) = Map::new(&fixture, 64);
    map.present.lock().unwrap()[40..41].fill(true);
    map.set_mode(Mode::Hold);
    let mut guest = start(&fixture, &map);
    let missing: Vec<u16> = (0..16).map(|sector| add_read(&mut guest, sector)).collect();
    guest.device.ring(0);
    let mut wanted: BTreeSet<u64> = (0..16).map(|sector| sector * SECTOR).collect();
    for _ in 0..16 {
        let bytes = asked.recv_timeout(TIMEOUT).unwrap();
        assert!(wanted.remove(&bytes.start), "{bytes:?} is requested once");
    }
    let present = add_read(&mut guest, 40);
    guest.device.ring(0);
    assert_eq!(guest.driver.wait_used().head, u32::from(present));
    expect_read(&guest.driver, 40, 40);
    // They are answered in the order of the answers.
    map.release(|bytes| bytes.start == 11 * SECTOR);
    assert_eq!(guest.driver.wait_used().head, u32::from(missing[11]));
    expect_read(&guest.driver, 11, 11 ^ 0xff);
    map.release(|_| true);
    let mut heads: BTreeSet<u32> = missing.iter().map(|head| u32::from(*head)).collect();
    heads.remove(&u32::from(missing[11]));
    for _ in 0..15 {
        assert!(heads.remove(&guest.driver.wait_used().head));
    }
    for sector in (0..16).filter(|sector| *sector != 11) {
        expect_read(&guest.driver, sector, sector as u8 ^ 0xff);
    }
    assert!(asked.try_recv().is_err());
}

#[test]
fn reads_waiting_at_a_capture_are_answered_exactly_once() {
    let fixture = Fixture::new(64);
    let (map, asked) = Map::new(&fixture, 64);
    map.present.lock().unwrap()[32..48].fill(true);
    map.set_mode(Mode::Hold);
    let mut guest = start(&fixture, &map);
    // Wraps around the ring of 64 entries first, so that positions and entries differ.
    for _ in 0..50 {
        assert_eq!(guest.read(40, 512).0, OK);
    }
    let mut waiting = BTreeSet::new();
    let mut passed = BTreeSet::new();
    for n in 0..8 {
        waiting.insert(u32::from(add_read(&mut guest, n)));
        passed.insert(u32::from(add_read(&mut guest, 32 + n)));
    }
    guest.device.ring(0);
    for _ in 0..8 {
        assert!(passed.remove(&guest.driver.wait_used().head));
        asked.recv_timeout(TIMEOUT).unwrap();
    }
    let (block, queues) = guest.device.stop();
    assert_eq!(guest.driver.next_used(), None);
    let state = queues[0].state();
    assert_eq!((state.next_avail, state.next_used), (50 + 8, 50 + 8));
    let saved = block.save();
    drop(block);

    // A clone continues from a copy of the memory, with one more request.
    let memory = copy_of(&guest.memory);
    map.set_mode(Mode::Fill);
    let options = BlockOptions {
        read_only: true,
        ..fixture.options()
    };
    let block = Block::restore(&options, &saved)
        .unwrap()
        .on_demand(map.clone());
    let device = Running::start(block, &memory, queues, FLUSHES);
    let mut guest = Guest {
        driver: guest.driver.over(memory.clone()),
        device,
        memory,
    };
    let last = add_read(&mut guest, 47);
    waiting.insert(u32::from(last));
    guest.device.ring(0);
    for _ in 0..9 {
        let head = guest.driver.wait_used().head;
        assert!(waiting.remove(&head), "head {head} was used twice");
    }
    for sector in 0..8 {
        expect_read(&guest.driver, sector, sector as u8 ^ 0xff);
    }
    expect_read(&guest.driver, 47, 47);
    let (_, queues) = guest.device.stop();
    assert_eq!(guest.driver.next_used(), None);
    assert_eq!(queues[0].state().next_avail, 50 + 17);
}

#[test]
fn a_reset_drops_waiting_reads() {
    let fixture = Fixture::new(64);
    let (map, asked) = Map::new(&fixture, 64);
    map.set_mode(Mode::Hold);
    let mut guest = start(&fixture, &map);
    for sector in 0..4 {
        add_read(&mut guest, sector);
    }
    guest.device.ring(0);
    for _ in 0..4 {
        asked.recv_timeout(TIMEOUT).unwrap();
    }
    let (block, _) = guest.device.stop();
    assert!(map.fetches.lock().unwrap().held.is_empty(), "given up");
    // The driver begins with new rings.
    map.set_mode(Mode::Fill);
    let driver = DriverQueue::new(guest.memory.clone(), RINGS, 64);
    let queue = driver.device_queue(false);
    let mut guest = Guest {
        device: Running::start(block, &guest.memory, vec![queue], FLUSHES),
        driver,
        memory: guest.memory,
    };
    assert_eq!(guest.read(20, 512), (OK, 513));
    assert_eq!(guest.driver.next_used(), None);
}
