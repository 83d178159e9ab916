//! A script for the driver of a virtqueue: what to put into guest memory, the
//! descriptor table and the available ring.

use crate::input::Input;
use jiffy_devices::GuestMemory;
use jiffy_devices::virtio::device::VirtioDevice;
use jiffy_devices::virtio::testing::{self, Buffer, DriverQueue, Running};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of guest memory.
pub const MEMORY_BYTES: usize = 0x80000;
/// Where the rings are.
pub const RINGS: u64 = 0x1000;
/// Where the script's own bytes go: headers, ranges, indirect tables.
pub const CONTENTS: u64 = 0x8000;

/// Between the rings of one queue and the next.
const RING_ROOM: u64 = 0x1000;
/// Places are in units of this many bytes.
const PLACE_UNIT: u64 = 8;
/// A flag no device knows: the address is far outside memory.
const FAR: u16 = 0x8000;
/// How long a device may keep a script's requests before it is stopped. A device whose
/// rings were overwritten may never answer, which is no failure.
const MOMENT: Duration = Duration::from_millis(2);

/// One descriptor.
#[derive(Clone, Copy)]
pub struct Descriptor {
    /// Address in units of 8 bytes.
    pub place: u16,
    /// Bytes.
    pub length: u32,
    /// Flags of the descriptor, and `FAR`.
    pub flags: u16,
    /// The next descriptor.
    pub next: u16,
}

/// What the driver does.
#[derive(Default)]
pub struct Script {
    /// Target-specific switches.
    pub switches: u8,
    /// The descriptor table, from its start.
    pub descriptors: Vec<Descriptor>,
    /// Heads to offer.
    pub heads: Vec<u16>,
    /// Guest memory from [`CONTENTS`].
    pub contents: Vec<u8>,
}

impl Script {
    /// Reads a script from a fuzzer's bytes.
    pub fn read(data: &[u8]) -> Script {
        let mut input = Input(data);
        let switches = input.u8();
        let descriptors = (0..input.u8() % 64)
            .map(|_| Descriptor {
                place: input.u16(),
                length: input.u32(),
                flags: input.u16(),
                next: input.u16(),
            })
            .collect();
        let heads = (0..input.u8() % 64).map(|_| input.u16()).collect();
        let contents = input.rest().to_vec();
        Script {
            switches,
            descriptors,
            heads,
            contents,
        }
    }

    /// The bytes it would be read from.
    pub fn write(&self) -> Vec<u8> {
        let mut data = vec![self.switches, self.descriptors.len() as u8];
        for descriptor in &self.descriptors {
            data.extend(descriptor.place.to_le_bytes());
            data.extend(descriptor.length.to_le_bytes());
            data.extend(descriptor.flags.to_le_bytes());
            data.extend(descriptor.next.to_le_bytes());
        }
        data.push(self.heads.len() as u8);
        for head in &self.heads {
            data.extend(head.to_le_bytes());
        }
        data.extend(&self.contents);
        data
    }

    /// Adds a chain of `(address, length, writable)` and offers it.
    pub fn chain(&mut self, buffers: &[(u64, u32, bool)]) {
        self.heads.push(self.descriptors.len() as u16);
        for (position, (address, length, writable)) in buffers.iter().enumerate() {
            let more = position + 1 < buffers.len();
            self.descriptors.push(Descriptor {
                place: (address / PLACE_UNIT) as u16,
                length: *length,
                flags: if more { testing::NEXT } else { 0 }
                    | if *writable { testing::WRITE } else { 0 },
                next: self.descriptors.len() as u16 + 1,
            });
        }
    }

    /// Plays the script against `device` on its only queue, of `size` entries,
    /// then stops the device.
    pub fn play<D: VirtioDevice>(&self, device: D, size: u16, features: u64, event_idx: bool) {
        self.play_on(device, &[size], 0, features, event_idx, |_| {});
    }

    /// The same on one of several queues; `then` runs at the end. Returns the device.
    pub fn play_on<D: VirtioDevice>(
        &self,
        device: D,
        sizes: &[u16],
        number: u16,
        features: u64,
        event_idx: bool,
        then: impl FnOnce(&mut D),
    ) -> D {
        let memory: Arc<GuestMemory> = testing::memory(MEMORY_BYTES);
        let mut drivers: Vec<DriverQueue> = (0..)
            .zip(sizes)
            .map(|(place, size)| DriverQueue::new(memory.clone(), RINGS + RING_ROOM * place, *size))
            .collect();
        let queues = drivers.iter().map(|driver| driver.device_queue(event_idx));
        let mut device = Running::start(device, &memory, queues.collect(), features);
        let driver = &mut drivers[usize::from(number)];
        self.offer(driver, sizes[usize::from(number)]);
        device.ring(number);
        let start = Instant::now();
        while usize::from(driver.used_index()) < self.heads.len()
            && device.interrupt.counts().needs_reset == 0
            && start.elapsed() < MOMENT
        {
            std::thread::yield_now();
        }
        then(&mut device.device);
        device.stop().0
    }

    /// Writes contents and descriptors and offers the heads, on a queue of `size`
    /// entries.
    pub fn offer(&self, driver: &mut DriverQueue, size: u16) {
        let room = MEMORY_BYTES - CONTENTS as usize;
        driver.store(CONTENTS, &self.contents[..self.contents.len().min(room)]);
        for (index, descriptor) in (0..size).zip(&self.descriptors) {
            let mut address = u64::from(descriptor.place) * PLACE_UNIT;
            if descriptor.flags & FAR != 0 {
                address = address.wrapping_sub(1 << 16);
            }
            driver.write_descriptor(
                driver.descriptors(),
                index,
                Buffer::readable(address, descriptor.length),
                descriptor.flags & !FAR,
                descriptor.next,
            );
        }
        for head in &self.heads {
            driver.offer(*head);
        }
    }
}
