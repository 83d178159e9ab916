//! A disk for another monitor, whose guest's driver does anything and which gives the
//! queue any place.

use super::block_queue;
use crate::Target;
use crate::queue::{MEMORY_BYTES, RINGS, Script};
use jiffy_devices::virtio::block::{Backend, BlockOptions};
use jiffy_devices::virtio::queue::RateLimit;
use jiffy_devices::virtio::testing::{self, DriverQueue};
use jiffy_disk::device::{Disk, SharedMemory};
use std::sync::{Arc, LazyLock};
use vhost_user_backend::{VhostUserBackend, VringMutex, VringT};
use vm_memory::GuestMemoryAtomic;
use vmm_sys_util::epoll::EventSet;

/// This target.
pub const TARGET: Target = Target {
    name: "vhost_disk",
    covers: &["crates/disk/src/device.rs"],
    seeds: block_queue::all_seeds,
    run,
};

const SIZE: u16 = 64;
const NO_FLUSH: u8 = 4;
/// The rings are where the script's first bytes say.
const ASTRAY: u8 = 8;
/// There is no such thread.
const WRONG_THREAD: u8 = 16;

static BACKEND: LazyLock<Arc<Backend>> = LazyLock::new(|| {
    let options = BlockOptions {
        path: block_queue::DISK.clone(),
        read_only: false,
        direct: false,
        id: "fuzz".into(),
        limit: RateLimit::default(),
    };
    Arc::new(Backend::open(&options).expect("the disk opens"))
});

fn run(data: &[u8]) {
    let script = Script::read(data);
    let guest = testing::memory(MEMORY_BYTES);
    let mut driver = DriverQueue::new(guest.clone(), RINGS, SIZE);
    script.offer(&mut driver, SIZE);
    let memory: SharedMemory = GuestMemoryAtomic::from(guest);
    let disk = Disk::new(BACKEND.clone(), 1, memory.clone());
    let features = match script.switches & NO_FLUSH {
        0 => disk.features(),
        _ => 0,
    };
    disk.acked_features(features);
    let vring = VringMutex::new(memory, SIZE).expect("a queue");
    vring.set_queue_size(SIZE);
    let (mut descriptors, mut avail, mut used) =
        (driver.descriptors(), driver.avail(), driver.used());
    if script.switches & ASTRAY != 0
        && let [a, b, c, d, ..] = script.contents[..]
    {
        let places = [a, b, c].map(|byte| u64::from(byte) << (d % 57));
        [descriptors, avail, used] = places;
    }
    if vring.set_queue_info(descriptors, avail, used).is_err() {
        return;
    }
    vring.set_queue_ready(true);
    vring.set_enabled(true);
    let thread = usize::from(script.switches & WRONG_THREAD != 0);
    let _ = disk.handle_event(0, EventSet::IN, &[vring], thread);
    let numbers = script.contents.first_chunk().copied().unwrap_or_default();
    let [offset, size] = [0, 4].map(|at| {
        let number: [u8; 8] = numbers;
        u32::from_le_bytes(number[at..at + 4].try_into().expect("four bytes"))
    });
    assert!(disk.get_config(offset, size).len() <= 256);
    block_queue::check_disk();
}
