//! The tests play the driver, over real rings.

mod giving;
mod hostile;
mod saving;
mod statistics;
mod target;
mod withholding;

use super::config::{F_PAGE_POISON, F_REPORTING, F_STATISTICS};
use super::{Balloon, BalloonArgs, PAGE, QUEUE_SIZES, Reclaim};
use crate::GuestMemory;
use crate::virtio::device::VirtioDevice;
use crate::virtio::testing::{Buffer, DriverQueue, Running, memory};
use std::io;
use std::sync::{Arc, Mutex};
use virtio_queue::Queue;
use vm_memory::GuestAddress;

const RAM: u64 = 32 << 20;
/// Address of page numbers and statistics.
const NUMBERS: u64 = 0x10_0000;
/// First address of the memory that the driver releases.
const FREE: u64 = 0x80_0000;

const INFLATE: u16 = 0;
const DEFLATE: u16 = 1;
const STATISTICS: u16 = 2;
const REPORTING: u16 = 3;

const ALL: u64 = F_STATISTICS | F_REPORTING;

/// Records what was released, as first page and number of pages; refuses ranges that it must never
/// get.
#[derive(Default)]
struct Host {
    taken: Mutex<Vec<(u64, u64)>>,
    /// Every release fails.
    broken: bool,
}

impl Host {
    fn take(&self) -> Vec<(u64, u64)> {
        std::mem::take(&mut self.taken.lock().unwrap())
    }
}

impl Reclaim for Host {
    fn release(&self, start: GuestAddress, length: u64) -> io::Result<()> {
        assert!(length > 0, "an empty range");
        assert!(start.0.is_multiple_of(PAGE) && length.is_multiple_of(PAGE));
        let mut taken = self.taken.lock().unwrap();
        taken.push((start.0 / PAGE, length / PAGE));
        match self.broken {
            true => Err(io::ErrorKind::OutOfMemory.into()),
            false => Ok(()),
        }
    }
}

/// A driver with its device.
struct Guest {
    memory: Arc<GuestMemory>,
    host: Arc<Host>,
    device: Running<Balloon>,
    queues: Vec<DriverQueue>,
}

impl Guest {
    fn new() -> Guest {
        Guest::with(memory(RAM as usize), ALL)
    }

    fn with(memory: Arc<GuestMemory>, features: u64) -> Guest {
        Guest::made(memory, features, Arc::new(Host::default()))
    }

    fn made(memory: Arc<GuestMemory>, features: u64, host: Arc<Host>) -> Guest {
        Guest::driving(Balloon::new(args(&host)), memory, features, host)
    }

    fn driving(
        balloon: Balloon,
        memory: Arc<GuestMemory>,
        features: u64,
        host: Arc<Host>,
    ) -> Guest {
        let queues: Vec<DriverQueue> = (1..)
            .zip(sizes(features))
            .map(|(place, size)| DriverQueue::new(memory.clone(), 0x1000 * place, size))
            .collect();
        let device = queues.iter().map(|q| q.device_queue(false)).collect();
        Guest {
            device: Running::start(balloon, &memory, device, features),
            memory,
            host,
            queues,
        }
    }

    fn balloon(&mut self) -> &mut Balloon {
        &mut self.device.device
    }

    fn queue(&mut self, index: u16) -> &mut DriverQueue {
        &mut self.queues[usize::from(index)]
    }

    /// Offers `buffers`, notifies, and waits for the answer.
    fn request(&mut self, queue: u16, buffers: &[Buffer]) {
        let head = self.queue(queue).add(buffers);
        self.device.ring(queue);
        let used = self.queue(queue).next_used().expect("an answer");
        assert_eq!((used.head, used.length), (u32::from(head), 0));
    }

    /// Writes page numbers to [`NUMBERS`]; returns the buffer that holds them.
    fn numbers(&self, pages: &[u32]) -> Buffer {
        let bytes: Vec<u8> = pages.iter().flat_map(|n| n.to_le_bytes()).collect();
        self.queues[0].store(NUMBERS, &bytes);
        Buffer::readable(NUMBERS, bytes.len() as u32)
    }

    /// Sends page numbers to a queue.
    fn send(&mut self, queue: u16, pages: &[u32]) {
        let buffer = self.numbers(pages);
        self.request(queue, &[buffer]);
    }

    fn config(&self) -> [u32; 4] {
        let mut bytes = [0; 16];
        self.device.device.read_config(0, &mut bytes);
        let fields = bytes.as_chunks::<4>().0;
        [0, 1, 2, 3].map(|index| u32::from_le_bytes(fields[index]))
    }

    fn stop(self) -> (Balloon, Vec<Queue>) {
        self.device.stop()
    }
}

fn args(host: &Arc<Host>) -> BalloonArgs {
    BalloonArgs {
        ram_bytes: RAM,
        reclaim: host.clone(),
    }
}

fn sizes(features: u64) -> Vec<u16> {
    let [inflate, deflate, statistics, reporting] = QUEUE_SIZES;
    let mut sizes = vec![inflate, deflate];
    if features & F_STATISTICS != 0 {
        sizes.push(statistics);
    }
    if features & F_REPORTING != 0 {
        sizes.push(reporting);
    }
    sizes
}
