//! Chains of descriptors (Virtio 1.3 §2.7.5), read many at a time.
//!
//! A request of one MiB has hundreds of descriptors. Reading each by itself, and looking up
//! its region of memory each time, takes as long as copying the data.

use crate::GuestMemory;
use virtio_bindings::virtio_ring::{VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};
use virtio_queue::{DescriptorChain, Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend as _};

/// Bytes of a descriptor.
const BYTES: usize = 16;
/// Descriptors read at once.
const WINDOW: usize = 32;

/// A chain: the table of its descriptors and the index of the first.
#[derive(Debug, Clone, Copy)]
pub struct Chain {
    table: GuestAddress,
    size: u16,
    head: u16,
}

impl Chain {
    /// The index of its first descriptor, by which it is returned to the driver.
    pub fn head(&self) -> u16 {
        self.head
    }

    /// The chain that the queue library found in this queue.
    pub fn of(queue: &Queue, found: &DescriptorChain<&GuestMemory>) -> Chain {
        Chain::at(queue, found.head_index())
    }

    /// The chain with this head.
    pub(crate) fn at(queue: &Queue, head: u16) -> Chain {
        Chain {
            table: GuestAddress(queue.desc_table()),
            size: queue.size(),
            head,
        }
    }
}

/// A run of guest memory that was not checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Descriptor {
    pub(crate) address: GuestAddress,
    pub(crate) length: u32,
    flags: u16,
    next: u16,
}

impl Descriptor {
    fn of(bytes: &[u8; BYTES]) -> Descriptor {
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = *bytes;
        Descriptor {
            address: GuestAddress(u64::from_le_bytes([a, b, c, d, e, f, g, h])),
            length: u32::from_le_bytes([i, j, k, l]),
            flags: u16::from_le_bytes([m, n]),
            next: u16::from_le_bytes([o, p]),
        }
    }

    fn has(&self, flag: u32) -> bool {
        u32::from(self.flags) & flag != 0
    }

    /// Whether another one follows.
    pub(crate) fn has_next(&self) -> bool {
        self.has(VRING_DESC_F_NEXT)
    }

    /// Whether the device writes this buffer instead of reading it.
    pub(crate) fn is_writable(&self) -> bool {
        self.has(VRING_DESC_F_WRITE)
    }
}

/// Iterates over the descriptors of a chain. It ends early where a chain violates a rule: the last
/// descriptor then still says that another one follows.
pub(crate) struct Walk<'a> {
    memory: &'a GuestMemory,
    table: GuestAddress,
    size: u16,
    next: Option<u16>,
    /// How many descriptors may still follow: no chain has more than its table.
    left: u16,
    /// How many bytes may still follow (§2.7.5.2).
    bytes_left: u32,
    indirect: bool,
    /// The descriptors of an indirect table that were read, from `first` on.
    window: Vec<[u8; BYTES]>,
    first: u16,
}

impl<'a> Walk<'a> {
    pub(crate) fn new(memory: &'a GuestMemory, chain: Chain) -> Walk<'a> {
        Walk {
            memory,
            table: chain.table,
            size: chain.size,
            next: Some(chain.head),
            left: chain.size,
            bytes_left: u32::MAX,
            indirect: false,
            window: Vec::new(),
            first: 0,
        }
    }

    fn read(&mut self, index: u16) -> Option<Descriptor> {
        let within = index.wrapping_sub(self.first);
        if let Some(bytes) = self.window.get(usize::from(within)) {
            return Some(Descriptor::of(bytes));
        }
        if index >= self.size {
            return None;
        }
        let address = self.table.0.checked_add(u64::from(index) * BYTES as u64)?;
        let address = GuestAddress(address);
        // In a queue's own table, a chain's descriptors may be anywhere.
        if !self.indirect {
            let mut bytes = [0; BYTES];
            match self.memory.get_slice(address, BYTES) {
                Ok(slice) => slice.copy_to(&mut bytes[..]),
                // It may extend into the next region.
                Err(_) => self
                    .memory
                    .read_slice(&mut bytes, address)
                    .map(|()| BYTES)
                    .ok()?,
            };
            return Some(Descriptor::of(&bytes));
        }
        let count = WINDOW.min(usize::from(self.size - index));
        self.window.resize(count, [0; BYTES]);
        let bytes = self.window.as_flattened_mut();
        self.memory.read_slice(bytes, address).ok()?;
        self.first = index;
        self.window.first().map(Descriptor::of)
    }

    /// Continues in an indirect table (§2.7.5.3).
    fn enter(&mut self, table: Descriptor) -> Option<()> {
        let size = table.length / BYTES as u32;
        if self.indirect || !table.length.is_multiple_of(BYTES as u32) {
            return None;
        }
        self.size = u16::try_from(size).ok()?;
        self.table = table.address;
        self.left = self.size;
        self.next = Some(0);
        self.indirect = true;
        Some(())
    }
}

impl Iterator for Walk<'_> {
    type Item = Descriptor;

    fn next(&mut self) -> Option<Descriptor> {
        let index = self.next.take()?;
        self.left = self.left.checked_sub(1)?;
        let descriptor = self.read(index)?;
        if descriptor.has(VRING_DESC_F_INDIRECT) {
            self.enter(descriptor)?;
            return self.next();
        }
        self.bytes_left = self.bytes_left.checked_sub(descriptor.length)?;
        self.next = descriptor.has_next().then_some(descriptor.next);
        Some(descriptor)
    }
}
