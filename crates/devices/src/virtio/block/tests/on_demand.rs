//! Disks whose file is filled as it is read.

use super::driver::*;
use crate::virtio::block::{Block, BlockOptions, Fetched, Residency, SECTOR, StopOrder};
use crate::virtio::testing::{Buffer, DriverQueue, Running, memory};
use rustix::event::{PollFd, PollFlags, poll};
use std::fs::OpenOptions;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(60);

/// What is there, by sectors, and what comes of asking for more.
#[derive(Debug)]
struct Map {
    path: PathBuf,
    present: Mutex<Vec<bool>>,
    asked: Mutex<Sender<Range<u64>>>,
    mood: Mutex<Mood>,
}

#[derive(Debug, Clone, Copy)]
enum Mood {
    Fill,
    Fail,
    /// The file has no room: some sectors at a time come as bytes.
    Bring(usize),
    /// As many, and what comes next is in the file.
    BringOnce(usize),
    /// Until the order to stop comes.
    Wait,
}

impl Map {
    fn new(fixture: &Fixture, sectors: usize) -> (Arc<Map>, Receiver<Range<u64>>) {
        let (asked, heard) = channel();
        let map = Map {
            path: fixture.path.clone(),
            present: Mutex::new(vec![false; sectors]),
            asked: Mutex::new(asked),
            mood: Mutex::new(Mood::Fill),
        };
        (Arc::new(map), heard)
    }

    fn feel(&self, mood: Mood) {
        *self.mood.lock().unwrap() = mood;
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

    fn fetch(&self, bytes: &Range<u64>, order: &StopOrder) -> io::Result<Fetched> {
        self.asked.lock().unwrap().send(bytes.clone()).unwrap();
        let mood = *self.mood.lock().unwrap();
        match mood {
            Mood::Bring(most) | Mood::BringOnce(most) => {
                if matches!(mood, Mood::BringOnce(_)) {
                    self.feel(Mood::Fill);
                }
                let sectors = Map::sectors(bytes).take(most);
                let came = sectors.flat_map(|sector| [sector as u8 ^ 0xff; SECTOR as usize]);
                Ok(Fetched::Bytes(came.collect()))
            }
            Mood::Fill => {
                let file = OpenOptions::new().write(true).open(&self.path).unwrap();
                let sectors = Map::sectors(bytes);
                for sector in sectors.clone() {
                    let bytes = [sector as u8 ^ 0xff; SECTOR as usize];
                    file.write_all_at(&bytes, sector as u64 * SECTOR).unwrap();
                }
                self.present.lock().unwrap()[sectors].fill(true);
                Ok(Fetched::Present)
            }
            Mood::Fail => Err(io::Error::other("chunk 1 cannot be had")),
            Mood::Wait => {
                while !order.has_come() {
                    let bell = order.bell().expect("a device has a bell");
                    let mut fds = [PollFd::from_borrowed_fd(bell, PollFlags::IN)];
                    poll(&mut fds, None).unwrap();
                    order.silence();
                }
                Err(io::ErrorKind::Interrupted.into())
            }
        }
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
fn what_is_there_is_read_and_what_is_missing_is_filled_first() {
    let fixture = Fixture::new(64);
    let (map, asked) = Map::new(&fixture, 64);
    map.present.lock().unwrap()[8..16].fill(true);
    let mut guest = start(&fixture, &map);
    assert_eq!(guest.read(8, 8 * 512), (OK, 8 * 512 + 1));
    assert_eq!(guest.load(DATA, 512), [8; 512]);
    assert!(asked.try_recv().is_err(), "nothing was missing");
    // A range that is partly there is asked for as a whole.
    assert_eq!(guest.read(15, 2 * 512), (OK, 2 * 512 + 1));
    assert_eq!(asked.try_recv().unwrap(), 15 * SECTOR..17 * SECTOR);
    assert_eq!(guest.load(DATA + 512, 512), [16 ^ 0xff; 512]);
    assert_eq!(guest.read(16, 512), (OK, 513));
    assert!(asked.try_recv().is_err(), "it is there now");
    // What is none of the disk's bytes is nobody's business.
    assert_eq!(guest.read(64, 512).0, IO_ERROR);
    assert_eq!(guest.read(u64::MAX / 512, 512).0, IO_ERROR);
    assert!(asked.try_recv().is_err());
}

#[test]
fn what_cannot_be_had_is_an_error_and_the_disk_goes_on() {
    let fixture = Fixture::new(64);
    let (map, asked) = Map::new(&fixture, 64);
    map.present.lock().unwrap()[..8].fill(true);
    map.feel(Mood::Fail);
    let mut guest = start(&fixture, &map);
    assert_eq!(guest.read(20, 4096), (IO_ERROR, 1));
    assert_eq!(guest.read(0, 4096).0, OK);
    assert_eq!(guest.read(20, 4096), (IO_ERROR, 1), "asked for anew");
    assert_eq!(asked.try_iter().count(), 2);
    map.feel(Mood::Fill);
    assert_eq!(guest.read(20, 4096).0, OK);
    assert_eq!(guest.load(DATA, 512), [20 ^ 0xff; 512]);
}

#[test]
fn what_the_file_has_no_room_for_is_read_as_it_came() {
    let fixture = Fixture::new(64);
    let (map, asked) = Map::new(&fixture, 64);
    let mut guest = start(&fixture, &map);
    // Into buffers that end where no answer does.
    let data = [
        Buffer::writable(DATA, 700),
        Buffer::writable(DATA + 700, 8 * 512 - 700),
    ];
    let expected: Vec<u8> = (16..24).flat_map(|sector| [sector ^ 0xff; 512]).collect();
    for (mood, questions) in [
        (Mood::Bring(3), 3),
        (Mood::Bring(8), 1),
        (Mood::BringOnce(3), 2),
    ] {
        map.feel(mood);
        guest.driver.store(DATA, &[0; 8 * 512]);
        assert_eq!(guest.request(IN, 16, &data), (OK, 8 * 512 + 1), "{mood:?}");
        assert_eq!(guest.load(DATA, 8 * 512), expected, "{mood:?}");
        assert_eq!(asked.try_iter().count(), questions, "{mood:?}");
    }
    // No bytes are no answer.
    map.present.lock().unwrap().fill(false);
    map.feel(Mood::Bring(0));
    assert_eq!(guest.read(16, 512), (IO_ERROR, 1));
}

#[test]
fn a_read_that_waits_goes_back_to_the_ring_and_is_done_later() {
    let fixture = Fixture::new(64);
    let (map, asked) = Map::new(&fixture, 64);
    map.feel(Mood::Wait);
    let mut guest = start(&fixture, &map);
    guest.write_header(IN, 30);
    guest.driver.add(&usual(&[Buffer::writable(DATA, 4096)]));
    guest.device.ring(0);
    asked.recv_timeout(PATIENCE).unwrap();
    // Rung for something else meanwhile.
    guest.device.ring(0);
    let (block, queues) = guest.device.stop();
    assert_eq!(guest.driver.next_used(), None);
    assert_eq!(queues[0].state().next_avail, 0, "it is in the ring again");
    assert_eq!(guest.driver.used_index(), 0);

    map.feel(Mood::Fill);
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

/// A pause may find a read that waits in the middle of a request of many
/// pieces.
#[test]
fn large_reads_are_filled_piece_by_piece() {
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
