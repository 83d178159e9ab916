//! Finds what was written since the last freeze.
//!
//! At first, the private pages of this process are those that were written. That costs nothing
//! until it is read from `/proc/self/pagemap`. For a VM that is captured repeatedly KVM keeps a
//! dirty log, which is cheaper to read, and pages stay mapped as they are
//! (`docs/dirty-tracking.md`).

use super::Contents;
use crate::memory::layers::{PAGE, union};
use crate::memory::mapping::Mapping;
use jiffy_devices::write_log::WriteLog;
use jiffy_sys::pagemap::Pagemap;
use jiffy_wire::vmm::Extent;
use kvm_ioctls::VmFd;
use std::fmt::Debug;
use std::io;
use std::sync::Arc;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

/// From this many freezes on, a VM counts as captured repeatedly.
const FREEZES: u32 = 2;

/// The dirty log of a guest.
pub(super) trait GuestLog: Debug + Send {
    /// The pages of a memslot of `size` bytes that were written since the last call, one
    /// bit each, lowest first.
    fn take(&self, slot: u32, size: u64) -> io::Result<Vec<u64>>;
}

impl GuestLog for Arc<VmFd> {
    fn take(&self, slot: u32, size: u64) -> io::Result<Vec<u64>> {
        Ok(self.get_dirty_log(slot, size as usize)?)
    }
}

/// How written pages are found.
#[derive(Debug, Default)]
pub(super) struct Tracking {
    freezes: u32,
    log: Log,
    /// The pages that were read from the log since the last freeze.
    read_from_log: Vec<Extent>,
}

#[derive(Debug, Default)]
enum Log {
    #[default]
    None,
    /// KVM refused the log, and is not asked again.
    Refused,
    /// The log began after the last freeze.
    Begun(Box<dyn GuestLog>),
    /// The log covers everything since the last freeze.
    Whole(Box<dyn GuestLog>),
}

impl Log {
    fn active(&self) -> Option<&dyn GuestLog> {
        match self {
            Log::None | Log::Refused => None,
            Log::Begun(log) | Log::Whole(log) => Some(&**log),
        }
    }
}

impl Tracking {
    /// Whether pages that a freeze copied may stay this process's own.
    pub fn uses_log(&self) -> bool {
        self.log.active().is_some()
    }

    /// Called when a freeze has captured all that was written until now.
    pub fn after_freeze(&mut self) {
        self.freezes += 1;
        self.read_from_log.clear();
        self.log = match std::mem::take(&mut self.log) {
            Log::Begun(log) => Log::Whole(log),
            other => other,
        };
    }
}

impl Contents {
    /// Whether the VM was captured often enough for a log to pay off.
    pub(in crate::memory) fn wants_log(&self) -> bool {
        self.tracking.freezes >= FREEZES && matches!(self.tracking.log, Log::None)
    }

    /// Starts KVM's dirty log for the guest's writes, and the monitor's log for its own.
    pub(in crate::memory) fn keep_log(&mut self, mapping: &Mapping, vm: &Arc<VmFd>) {
        match mapping.give_to(vm, kvm_bindings::KVM_MEM_LOG_DIRTY_PAGES) {
            Ok(()) => self.begin_log(mapping, Box::new(vm.clone())),
            Err(error) => {
                tracing::warn!(%error, "KVM's dirty log could not be started; captures take longer");
                self.tracking.log = Log::Refused;
            }
        }
    }

    fn begin_log(&mut self, mapping: &Mapping, log: Box<dyn GuestLog>) {
        for region in mapping.memory.iter() {
            WriteLog::of(region).keep();
        }
        self.tracking.log = Log::Begun(log);
    }

    /// The ranges of RAM that were written since the last freeze, or since frozen memory of another
    /// VM was mapped. Before the first freeze, all of RAM.
    pub(in crate::memory) fn written(&mut self, mapping: &Mapping) -> io::Result<Vec<Extent>> {
        self.tracking.ask_log(mapping)?;
        if !matches!(self.tracking.log, Log::Whole(_)) {
            return own_pages(mapping, &[mapping.whole()]);
        }
        // Released ranges were mapped again.
        let released = union(self.released.clone());
        let mut written = outside(&self.tracking.read_from_log, &released);
        if !released.is_empty() {
            written.extend(own_pages(mapping, &released)?);
        }
        Ok(written)
    }
}

impl Tracking {
    /// Reads the log. Reading clears it, so the pages are kept until the next freeze.
    fn ask_log(&mut self, mapping: &Mapping) -> io::Result<()> {
        let Some(log) = self.log.active() else {
            return Ok(());
        };
        let mut offset = 0;
        for (slot, region) in (0..).zip(mapping.memory.iter()) {
            let mut pages = log.take(slot, region.len())?;
            for (pages, ours) in pages.iter_mut().zip(WriteLog::of(region).take()) {
                *pages |= ours;
            }
            push_ranges(&mut self.read_from_log, &pages, offset);
            offset += region.len();
        }
        self.read_from_log = union(std::mem::take(&mut self.read_from_log));
        Ok(())
    }
}

/// The pages of these ranges that are this process's own.
fn own_pages(mapping: &Mapping, extents: &[Extent]) -> io::Result<Vec<Extent>> {
    // Opened for each query. Opening it at every boot would be the most expensive of all opens, and
    // hardly any VM is ever queried.
    let pagemap = Pagemap::open().map_err(|error| {
        io::Error::new(
            error.kind(),
            format!("/proc/self/pagemap, which lists the written pages, can't be opened: {error}"),
        )
    })?;
    let mut written = Vec::new();
    for extent in extents {
        for (address, offset, length) in mapping.host_parts(*extent) {
            let start = address as u64;
            for range in pagemap.own_pages(start..start + length)? {
                written.push(Extent {
                    offset: offset + (range.start - start),
                    length: range.end - range.start,
                });
            }
        }
    }
    Ok(written)
}

/// Adds the ranges whose bits are set; the first bit is the page at `offset`.
fn push_ranges(ranges: &mut Vec<Extent>, pages: &[u64], offset: u64) {
    for (word, mut bits) in (0..).zip(pages.iter().copied()) {
        while bits != 0 {
            let first = bits.trailing_zeros();
            let count = (bits >> first).trailing_ones();
            ranges.push(Extent {
                offset: offset + (word * 64 + u64::from(first)) * PAGE,
                length: u64::from(count) * PAGE,
            });
            bits &= u64::MAX.checked_shl(first + count).unwrap_or(0);
        }
    }
}

/// The parts of `ranges` outside `holes`; both are sorted and do not touch.
fn outside(ranges: &[Extent], holes: &[Extent]) -> Vec<Extent> {
    let mut rest = Vec::with_capacity(ranges.len());
    let mut holes = holes.iter().peekable();
    for range in ranges {
        let (mut at, end) = (range.offset, range.offset + range.length);
        while at < end {
            // Holes that end before this are not needed any more.
            while holes
                .next_if(|hole| hole.offset + hole.length <= at)
                .is_some()
            {}
            let hole = holes.peek().filter(|hole| hole.offset < end);
            let until = hole.map_or(end, |hole| hole.offset.max(at));
            if until > at {
                rest.push(Extent {
                    offset: at,
                    length: until - at,
                });
            }
            at = hole.map_or(end, |hole| hole.offset + hole.length);
        }
    }
    rest
}

#[cfg(test)]
impl crate::memory::GuestRam {
    /// A log without a guest: it has only the monitor's writes.
    pub(super) fn keep_log_of_monitor(&self) {
        #[derive(Debug)]
        struct NoGuest;
        impl GuestLog for NoGuest {
            fn take(&self, _slot: u32, size: u64) -> io::Result<Vec<u64>> {
                Ok(vec![0; (size / PAGE).div_ceil(64) as usize])
            }
        }
        self.lock().begin_log(&self.mapping, Box::new(NoGuest));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pages_of(ranges: &[Extent]) -> Vec<u64> {
        let pages = |range: &Extent| {
            let first = range.offset / PAGE;
            first..first + range.length / PAGE
        };
        ranges.iter().flat_map(pages).collect()
    }

    fn ranges_of(words: &[u64]) -> Vec<Extent> {
        let mut ranges = Vec::new();
        push_ranges(&mut ranges, words, 0);
        union(ranges)
    }

    proptest! {
        #[test]
        fn each_bit_is_one_page(words in proptest::collection::vec(any::<u64>(), 0..4)) {
            let bit = |page: &u64| words[(page / 64) as usize] >> (page % 64) & 1 == 1;
            let expected: Vec<u64> = (0..words.len() as u64 * 64).filter(bit).collect();
            prop_assert_eq!(pages_of(&ranges_of(&words)), expected);
        }

        #[test]
        fn ranges_outside_of_holes_remain(
            words in proptest::collection::vec(any::<u64>(), 3),
            holes in proptest::collection::vec(any::<u64>() , 3),
            coarse in any::<bool>(),
        ) {
            let holes = match coarse {
                true => holes.iter().map(|word| word & word >> 1 & word >> 2).collect(),
                false => holes,
            };
            let left: Vec<u64> = words.iter().zip(&holes).map(|(word, hole)| word & !hole).collect();
            let outside = outside(&ranges_of(&words), &ranges_of(&holes));
            prop_assert_eq!(pages_of(&outside), pages_of(&ranges_of(&left)));
        }
    }

    #[test]
    fn adjacent_bits_are_one_range_across_words() {
        assert_eq!(
            ranges_of(&[u64::MAX, 1]),
            [Extent {
                offset: 0,
                length: 65 * PAGE
            }]
        );
    }
}
