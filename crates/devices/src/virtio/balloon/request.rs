//! Reads requests from guest memory and checks them (Virtio 1.3 §5.5.6).

use super::{PAGE, PAGES_MAX, STATISTICS_BYTES_MAX};
use crate::GuestMemory;
use crate::virtio::queue::chain::{Chain, Descriptor, Walk};
use std::ops::Range;
use vm_memory::Bytes;

const PAGE_NUMBER_BYTES: usize = 4;

/// A request's page numbers, sorted; reused for the next request.
#[derive(Debug)]
pub(super) struct Pages {
    bytes: Vec<u8>,
    numbers: Vec<u32>,
}

impl Pages {
    pub(super) fn new() -> Pages {
        Pages {
            bytes: Vec::with_capacity(PAGES_MAX * PAGE_NUMBER_BYTES),
            numbers: Vec::with_capacity(PAGES_MAX),
        }
    }

    /// Reads an inflate request; if part of it can't be read, nothing is taken.
    pub(super) fn read(&mut self, memory: &GuestMemory, chain: Chain) {
        self.numbers.clear();
        let most = PAGES_MAX * PAGE_NUMBER_BYTES;
        if gather(memory, chain, most, &mut self.bytes).is_none() {
            return tracing::debug!("balloon: page numbers outside guest memory");
        }
        let numbers = self.bytes.as_chunks::<PAGE_NUMBER_BYTES>().0;
        self.numbers
            .extend(numbers.iter().map(|bytes| u32::from_le_bytes(*bytes)));
        // Linux takes pages in any order, adjacent ones often in descending order.
        self.numbers.sort_unstable();
    }

    /// The guest physical ranges of the pages; adjacent ones are joined.
    pub(super) fn ranges(&self) -> impl Iterator<Item = Range<u64>> {
        let mut numbers = self.numbers.iter().map(|n| u64::from(*n)).peekable();
        std::iter::from_fn(move || {
            let first = numbers.next()?;
            let mut end = first + 1;
            // A number may occur twice.
            while let Some(next) = numbers.next_if(|next| *next <= end) {
                end = end.max(next + 1);
            }
            Some(first * PAGE..end * PAGE)
        })
    }
}

/// Reads the contents of a statistics buffer; `into` is empty if it can't be read.
pub(super) fn read_statistics(memory: &GuestMemory, chain: Chain, into: &mut Vec<u8>) {
    if gather(memory, chain, STATISTICS_BYTES_MAX, into).is_none() {
        into.clear();
        tracing::debug!("balloon: statistics outside guest memory");
    }
}

/// Collects the first `most` bytes of the buffers that the device may read.
fn gather(memory: &GuestMemory, chain: Chain, most: usize, into: &mut Vec<u8>) -> Option<()> {
    into.clear();
    let readable = |buffer: &Descriptor| !buffer.is_writable();
    for buffer in Walk::new(memory, chain).filter(readable) {
        let filled = into.len();
        let count = (buffer.length as usize).min(most - filled);
        into.resize(filled + count, 0);
        memory
            .read_slice(&mut into[filled..], buffer.address)
            .ok()?;
        if into.len() == most {
            break;
        }
    }
    Some(())
}

/// The guest physical ranges that a report declares free: the buffers that the device may write.
pub(super) fn reported(memory: &GuestMemory, chain: Chain) -> impl Iterator<Item = Range<u64>> {
    let buffers = Walk::new(memory, chain).filter(Descriptor::is_writable);
    buffers.map(|buffer| {
        let start = buffer.address.0;
        start..start.saturating_add(u64::from(buffer.length))
    })
}
