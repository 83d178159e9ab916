//! Who takes memory back, and how much at a time.

use super::PAGE;
use crate::GuestMemory;
use std::io;
use std::ops::Range;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

/// Takes guest memory back for the host.
pub trait Reclaim: Send + Sync {
    /// Gives `length` bytes of guest RAM from `start` back to the host. The guest does not
    /// need their contents; when it touches them next, which may be while this runs, it
    /// reads zeros or what was there.
    ///
    /// The range is not empty, begins and ends on a page, and lies in one
    /// region of guest RAM. May be called from any thread, also from two at
    /// once.
    fn release(&self, start: GuestAddress, length: u64) -> io::Result<()>;
}

/// What one notification may cost: calls of [`Reclaim::release`], and bytes.
/// A well-behaved guest needs a fraction; requests beyond it are answered, and
/// the memory stays where it is.
#[derive(Debug)]
pub struct Budget {
    calls: u32,
    bytes: u64,
}

/// Four requests of Windows's, 16 of Linux's, none of whose pages are
/// neighbours.
const CALLS_MAX: u32 = 4096;

impl Budget {
    /// All of a guest's RAM, once.
    pub(super) fn new(ram_bytes: u64) -> Budget {
        Budget {
            calls: CALLS_MAX,
            bytes: ram_bytes,
        }
    }

    /// Nothing more may be given back.
    pub(super) fn is_spent(&self) -> bool {
        self.calls == 0 || self.bytes == 0
    }

    /// Takes what releasing `length` bytes costs, if there is enough.
    pub(super) fn take(&mut self, length: u64) -> bool {
        match self.bytes.checked_sub(length) {
            Some(bytes) if self.calls > 0 => {
                self.calls -= 1;
                self.bytes = bytes;
                true
            }
            _ => false,
        }
    }
}

/// The whole pages of guest RAM in a range of guest physical addresses, by
/// region.
pub(super) fn pages_in_ram(
    memory: &GuestMemory,
    range: Range<u64>,
) -> impl Iterator<Item = Range<u64>> {
    memory.iter().filter_map(move |region| {
        let first = region.start_addr().0;
        let start = range.start.max(first).checked_next_multiple_of(PAGE)?;
        let end = range.end.min(first.saturating_add(region.len())) & !(PAGE - 1);
        (start < end).then_some(start..end)
    })
}
