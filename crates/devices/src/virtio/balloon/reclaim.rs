//! Releases guest memory, with a limit per notification.

use super::PAGE;
use crate::GuestMemory;
use std::io;
use std::ops::Range;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

/// Releases guest memory to the host.
pub trait Reclaim: Send + Sync {
    /// Releases `length` bytes of guest RAM from the guest physical address `start` on to the host.
    /// The guest does not need their contents; when it accesses them next, which may be during this
    /// call, it reads zeros or the old contents.
    ///
    /// The range is not empty, is page-aligned at both ends, and is in one region of guest RAM. May
    /// be called from any thread, also concurrently.
    ///
    /// # Errors
    ///
    /// If the host refuses. The memory may not be released then; the guest can use it all the same.
    fn release(&self, start: GuestAddress, length: u64) -> io::Result<()>;

    /// The same for memory that the guest has taken out of use: what it reads there next may be
    /// anything that it was allowed to read before.
    ///
    /// # Errors
    ///
    /// As for [`release`](Reclaim::release).
    fn discard(&self, start: GuestAddress, length: u64) -> io::Result<()> {
        self.release(start, length)
    }
}

/// Limits one notification: calls of [`Reclaim::release`], and bytes. A well-behaved guest needs a
/// fraction. Requests beyond the limit are answered, and their memory is not released.
#[derive(Debug)]
pub struct Budget {
    calls: u32,
    bytes: u64,
}

/// Four requests of Windows's, or 16 of Linux's, without adjacent pages.
const CALLS_MAX: u32 = 4096;

impl Budget {
    /// A budget of all of a guest's RAM, once.
    pub(super) fn new(ram_bytes: u64) -> Budget {
        Budget {
            calls: CALLS_MAX,
            bytes: ram_bytes,
        }
    }

    /// Whether nothing more may be released.
    pub(super) fn is_exhausted(&self) -> bool {
        self.calls == 0 || self.bytes == 0
    }

    /// Takes the cost of releasing `length` bytes; false if the budget is too small.
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

/// The whole pages of guest RAM within a range of guest physical addresses, split by region.
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
