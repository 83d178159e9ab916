//! Chains of descriptors (Virtio 1.3 §2.7.5).
//!
//! A request of one MiB has hundreds of descriptors, and as many chains are received in a MiB of
//! frames. Looking up the memory of each descriptor takes as long as copying the data, so a table's
//! is looked up once.

use crate::GuestMemory;
use crate::write_log::WriteLog;
use virtio_bindings::virtio_ring::{VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};
use virtio_queue::{DescriptorChain, Queue, QueueT};
use vm_memory::bitmap::BS;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend as _, VolatileMemory as _, VolatileSlice};

/// Bytes of a descriptor.
const BYTES: usize = size_of::<Bits>();

/// A descriptor as it is in memory: little endian.
type Bits = u128;

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
    fn of(bits: Bits) -> Descriptor {
        let bits = Bits::from_le(bits);
        Descriptor {
            address: GuestAddress(bits as u64),
            length: (bits >> 64) as u32,
            flags: (bits >> 96) as u16,
            next: (bits >> 112) as u16,
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

/// A table of descriptors.
#[derive(Clone, Copy)]
pub(crate) struct Table<'a> {
    memory: &'a GuestMemory,
    address: GuestAddress,
    size: u16,
    /// Its bytes, if all are in one region of memory.
    bytes: Option<VolatileSlice<'a, BS<'a, WriteLog>>>,
}

impl<'a> Table<'a> {
    /// The table of a queue's descriptors.
    pub(crate) fn of_queue(queue: &Queue, memory: &'a GuestMemory) -> Table<'a> {
        Table::of(memory, GuestAddress(queue.desc_table()), queue.size())
    }

    fn of(memory: &'a GuestMemory, address: GuestAddress, size: u16) -> Table<'a> {
        Table {
            memory,
            address,
            size,
            bytes: memory.get_slice(address, usize::from(size) * BYTES).ok(),
        }
    }

    #[inline]
    fn read(&self, index: u16) -> Option<Descriptor> {
        if index >= self.size {
            return None;
        }
        let offset = usize::from(index) * BYTES;
        let bits = match &self.bytes {
            Some(bytes) => bytes.get_ref(offset).ok()?.load(),
            None => self.read_apart(offset)?,
        };
        Some(Descriptor::of(bits))
    }

    fn read_apart(&self, offset: usize) -> Option<Bits> {
        let address = self.address.0.checked_add(offset as u64)?;
        self.memory.read_obj(GuestAddress(address)).ok()
    }

    /// The descriptor of the chain with this head, if it has no other.
    #[inline]
    pub(crate) fn single(&self, head: u16) -> Option<Descriptor> {
        self.read(head)
            .filter(|only| !only.has(VRING_DESC_F_NEXT | VRING_DESC_F_INDIRECT))
    }

    /// Iterates over the descriptors of the chain with this head.
    #[inline]
    pub(crate) fn walk(self, head: u16) -> Walk<'a> {
        Walk {
            next: Some(head),
            left: self.size,
            bytes_left: u32::MAX,
            indirect: false,
            table: self,
        }
    }
}

/// Iterates over the descriptors of a chain. It ends early where a chain violates a rule: the last
/// descriptor then still says that another one follows.
pub(crate) struct Walk<'a> {
    table: Table<'a>,
    next: Option<u16>,
    /// How many descriptors may still follow: no chain has more than its table.
    left: u16,
    /// How many bytes may still follow (§2.7.5.2).
    bytes_left: u32,
    indirect: bool,
}

impl<'a> Walk<'a> {
    pub(crate) fn new(memory: &'a GuestMemory, chain: Chain) -> Walk<'a> {
        Table::of(memory, chain.table, chain.size).walk(chain.head)
    }

    /// Continues in an indirect table (§2.7.5.3).
    fn enter(&mut self, table: Descriptor) -> Option<()> {
        let size = table.length / BYTES as u32;
        if self.indirect || !table.length.is_multiple_of(BYTES as u32) {
            return None;
        }
        let size = u16::try_from(size).ok()?;
        self.table = Table::of(self.table.memory, table.address, size);
        self.left = size;
        self.next = Some(0);
        self.indirect = true;
        Some(())
    }
}

impl Iterator for Walk<'_> {
    type Item = Descriptor;

    #[inline]
    fn next(&mut self) -> Option<Descriptor> {
        let index = self.next.take()?;
        self.left = self.left.checked_sub(1)?;
        let descriptor = self.table.read(index)?;
        if descriptor.has(VRING_DESC_F_INDIRECT) {
            self.enter(descriptor)?;
            return self.next();
        }
        self.bytes_left = self.bytes_left.checked_sub(descriptor.length)?;
        self.next = descriptor.has_next().then_some(descriptor.next);
        Some(descriptor)
    }
}
