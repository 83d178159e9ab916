//! Checks that devices do not delay each other.

use super::block::{Block, BlockOptions};
use super::device::VirtioDevice;
use super::queue::RateLimit;
use super::testing::{Buffer, DriverQueue, Running, TIMEOUT, memory};
use super::vsock::{Vsock, VsockArgs};
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const DISK_BYTES: u64 = 8 << 20;
const MEMORY_BYTES: usize = 32 << 20;
const BLOCK_RINGS: u64 = 0x1000;
const VSOCK_RINGS: u64 = 0x10_000;
const HEADER: u64 = 0x8000;
const STATUS: u64 = 0x9000;
const PACKETS: u64 = 0x80_000;
const DATA: u64 = 0x80_0000;

const GUEST_CID: u64 = 3;
const PORT: u32 = 7;
const HEADER_BYTES: u32 = 44;
const RECEIVE_BYTES: u32 = 128;
const RESPONSE: u8 = 2;

/// A disk whose queue is always full of large reads.
struct Flood {
    device: Running<Block>,
    driver: DriverQueue,
    sent: u64,
    answered: u64,
}

impl Flood {
    fn start(folder: &TempDir) -> Flood {
        let path = folder.path().join("disk.img");
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(DISK_BYTES).unwrap();
        let block = Block::open(&BlockOptions {
            path,
            read_only: true,
            direct: false,
            id: String::new(),
            limit: RateLimit::default(),
        })
        .unwrap();
        let memory = memory(MEMORY_BYTES);
        let driver = DriverQueue::new(memory.clone(), BLOCK_RINGS, 128);
        let queue = driver.device_queue(false);
        driver.store(HEADER, &[0; 16]);
        Flood {
            device: Running::start(block, &memory, vec![queue], 0),
            driver,
            sent: 0,
            answered: 0,
        }
    }

    fn fill(&mut self) {
        self.count();
        while self.sent - self.answered < 40 {
            self.driver.add(&[
                Buffer::readable(HEADER, 16),
                Buffer::writable(DATA, DISK_BYTES as u32),
                Buffer::writable(STATUS, 1),
            ]);
            self.sent += 1;
        }
        self.device.ring(0);
    }

    /// Waits until the disk has answered another request.
    fn wait_for_progress(&mut self) {
        self.driver.wait_used();
        self.answered += 1;
    }

    fn count(&mut self) -> u64 {
        while self.driver.next_used().is_some() {
            self.answered += 1;
        }
        self.answered
    }
}

/// A guest that connects to the host.
struct Caller {
    device: Running<Vsock>,
    receive: DriverQueue,
    send: DriverQueue,
    calls: u32,
}

impl Caller {
    fn start(folder: &TempDir) -> Caller {
        let path = folder.path().join("v");
        let vsock = Vsock::new(VsockArgs {
            cid: GUEST_CID,
            path,
        })
        .unwrap();
        let memory = memory(MEMORY_BYTES);
        let mut base = VSOCK_RINGS;
        let mut drivers = Vec::new();
        for size in vsock.queue_max_sizes() {
            drivers.push(DriverQueue::new(memory.clone(), base, *size));
            base = (base + DriverQueue::ring_bytes(*size)).next_multiple_of(16);
        }
        let queues = drivers.iter().map(|driver| driver.device_queue(false));
        let device = Running::start(vsock, &memory, queues.collect(), 0);
        let mut drivers = drivers.into_iter();
        Caller {
            device,
            receive: drivers.next().unwrap(),
            send: drivers.next().unwrap(),
            calls: 0,
        }
    }

    /// Sends a REQUEST and waits for the host's RESPONSE.
    fn call(&mut self) {
        self.calls += 1;
        let slot = PACKETS + u64::from(self.calls) * 0x100;
        self.receive.add(&[Buffer::writable(slot, RECEIVE_BYTES)]);
        let mut header = [0; HEADER_BYTES as usize];
        header[..8].copy_from_slice(&GUEST_CID.to_le_bytes());
        header[8] = 2;
        header[16..20].copy_from_slice(&(1000 + self.calls).to_le_bytes());
        header[20..24].copy_from_slice(&PORT.to_le_bytes());
        header[28] = 1;
        header[30] = 1;
        header[36..40].copy_from_slice(&0x1000u32.to_le_bytes());
        self.send.store(slot + 0x80, &header);
        self.send
            .add(&[Buffer::readable(slot + 0x80, HEADER_BYTES)]);
        self.device.ring(0);
        self.device.ring(1);
        let start = Instant::now();
        while self.receive.next_used().is_none() {
            assert!(
                start.elapsed() < TIMEOUT,
                "no answer to call {}",
                self.calls
            );
            std::thread::sleep(Duration::from_micros(20));
        }
        let mut answer = [0; HEADER_BYTES as usize];
        self.receive.load(slot, &mut answer);
        assert_eq!(answer[30], RESPONSE);
    }
}

#[test]
fn a_flood_on_a_disk_does_not_delay_vsock() {
    const CALLS: usize = 20;
    let folder = TempDir::new().unwrap();
    let _host = UnixListener::bind(folder.path().join(format!("v_{PORT}"))).unwrap();
    let mut flood = Flood::start(&folder);
    let mut caller = Caller::start(&folder);
    // If vsock waited for the disk, all requests sent to the disk before a connection would be
    // answered before it.
    let mut overtaken = 0;
    for _ in 0..CALLS {
        flood.fill();
        flood.wait_for_progress();
        let waiting = flood.sent;
        caller.call();
        if flood.count() < waiting {
            overtaken += 1;
        }
    }
    // On a busy computer some calls may lose the race.
    assert!(
        overtaken * 2 > CALLS,
        "only {overtaken} of {CALLS} calls overtook the disk"
    );
}
