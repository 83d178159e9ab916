//! One VM's memory: what is filled, what was given up.

mod fill;
mod removed;
mod touched;

use fill::Met;
pub(crate) use fill::PIECE;
pub use fill::Stop;
pub use removed::{Owner, Removed};
pub use touched::Touched;

use crate::bitmap::Bitmap;
use crate::handshake::Layout;
use crate::image::ChunkImage;
use crate::scratch::Scratch;
use jiffy_sys::clock::monotonic_ns;
use jiffy_sys::userfaultfd::{EVENTS, Event, Userfaultfd};
use jiffy_wire::pager::PagerStats;
use jiffy_wire::vmm::Extent;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

/// A VMM whose faults are served.
///
/// Memory is filled in units: a chunk of the image, or a page of the VM where
/// that is larger. A page that exists is never changed, so that two workers
/// may fill the same unit.
///
/// **Removals.** A page that the VM gives up must read as zero from then on,
/// and never get the image's bytes again, even from a worker that has read
/// them before. The kernel holds the removal up until its event is read. So
/// events are read with the gate locked for writing, and every fill looks at
/// the removed pages and calls the kernel with the gate locked for reading:
/// no fill is under way when a removal becomes known, and each later one
/// knows of it.
pub struct Vm {
    name: String,
    token: u64,
    uffd: Userfaultfd,
    layout: Layout,
    image: Arc<dyn ChunkImage>,
    unit: u64,
    gate: RwLock<()>,
    removed: Removed,
    filled: Bitmap,
    counters: Arc<Counters>,
    touched: Option<Arc<Touched>>,
    /// Jobs that fill its memory ahead of need.
    jobs: AtomicUsize,
    ended: jiffy_store::Stop,
    failure: OnceLock<String>,
    on_failure: Box<dyn Fn(&str) + Send + Sync>,
}

/// What a [`Vm`] is made of.
pub struct VmParts {
    /// For messages.
    pub name: String,
    /// Unique in the process.
    pub token: u64,
    /// As received.
    pub uffd: Userfaultfd,
    /// As the handshake said.
    pub layout: Layout,
    /// What its memory contains.
    pub image: Arc<dyn ChunkImage>,
    /// What a predecessor knew to be given up, and where to note more.
    pub removed: Removed,
    /// Where to count.
    pub counters: Arc<Counters>,
    /// Where to record, if that is wanted.
    pub touched: Option<Arc<Touched>>,
    /// Told once, from a worker, when the VM can be served no longer.
    pub on_failure: Box<dyn Fn(&str) + Send + Sync>,
}

/// A fault that was read.
#[derive(Debug, Clone, Copy)]
pub struct Fault {
    /// In the VMM's memory.
    pub address: u64,
    /// Host CLOCK_MONOTONIC, nanoseconds.
    pub read_at: u64,
}

impl Vm {
    /// Gets ready to serve, and wakes all that wait: their faults may have
    /// been told to a predecessor.
    pub fn new(parts: VmParts) -> io::Result<Vm> {
        for region in parts.layout.regions() {
            parts.uffd.wake(region.address, region.size)?;
        }
        let unit = (parts.image.chunk_size() as u64).max(parts.layout.largest_page());
        Ok(Vm {
            filled: Bitmap::new(parts.layout.end().div_ceil(unit)),
            unit,
            name: parts.name,
            token: parts.token,
            uffd: parts.uffd,
            layout: parts.layout,
            image: parts.image,
            gate: RwLock::new(()),
            removed: parts.removed,
            counters: parts.counters,
            touched: parts.touched,
            jobs: AtomicUsize::new(0),
            ended: jiffy_store::Stop::new(),
            failure: OnceLock::new(),
            on_failure: parts.on_failure,
        })
    }

    /// As in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Unique in the process.
    pub fn token(&self) -> u64 {
        self.token
    }

    pub(crate) fn image(&self) -> &Arc<dyn ChunkImage> {
        &self.image
    }

    /// The chunks that a restore needs, as far as the image knows them, and that
    /// are still missing.
    pub(crate) fn working_set(&self) -> Vec<u32> {
        let mut chunks = self.image.working_set().unwrap_or_else(|error| {
            tracing::warn!(vm = self.name, "no working set: {error}");
            Vec::new()
        });
        let size = self.image.chunk_size() as u64;
        chunks.retain(|chunk| !self.is_filled(u64::from(*chunk) * size / self.unit));
        chunks
    }

    /// Bytes that are filled at once.
    pub(crate) fn unit(&self) -> u64 {
        self.unit
    }

    /// Units up to the end of what is mapped.
    pub(crate) fn units(&self) -> u64 {
        self.layout.end().div_ceil(self.unit)
    }

    /// Chunks of the image in a unit.
    pub(crate) fn chunks_of_unit(&self) -> u64 {
        self.unit / self.image.chunk_size() as u64
    }

    pub(crate) fn is_filled(&self, unit: u64) -> bool {
        self.filled.get(unit)
    }

    /// The VM maps these ranges of the image and wants no page of them.
    pub(crate) fn note_shared(&self, covers: &[Extent]) {
        for extent in covers {
            let end = extent.offset + extent.length;
            // The last unit may be longer than the image.
            let until = match end >= self.layout.end() {
                true => self.units(),
                false => end / self.unit,
            };
            self.filled
                .set_range(extent.offset.div_ceil(self.unit)..until);
            self.counters.shared(extent.length);
        }
    }

    /// A job fills its memory from now on.
    pub(crate) fn begin_job(&self) {
        self.jobs.fetch_add(1, Ordering::Relaxed);
    }

    /// A job has ended.
    pub(crate) fn end_job(&self) {
        self.jobs.fetch_sub(1, Ordering::Relaxed);
    }

    /// Its memory is being filled ahead of need.
    pub(crate) fn has_job(&self) -> bool {
        self.jobs.load(Ordering::Relaxed) > 0
    }

    /// Given up when it is served no longer: for what is done for it alone.
    pub fn stop(&self) -> &jiffy_store::Stop {
        &self.ended
    }

    /// It is served no longer, or cannot be.
    pub fn has_ended(&self) -> bool {
        self.ended.is_given_up()
    }

    /// Serves it no longer.
    pub(crate) fn end(&self) {
        self.ended.give_up();
    }

    /// Why it can be served no longer.
    pub fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// Serves it no longer, because of this. Only the first failure counts.
    pub(crate) fn fail(&self, sentence: String) {
        if self.has_ended() {
            return;
        }
        if self.failure.set(sentence).is_ok() {
            self.end();
            let sentence = self.failure.get().expect("just set");
            tracing::error!(vm = %self.name, "{sentence}");
            (self.on_failure)(sentence);
        }
    }

    /// Reads waiting events: notes what was given up, appends the faults.
    pub(crate) fn take_faults(&self, events: &mut Vec<Event>, faults: &mut Vec<Fault>) {
        events.clear();
        let gate = self.gate.write().unwrap_or_else(PoisonError::into_inner);
        // A full batch may hide more; whoever reads comes back until none.
        let outcome = self.uffd.read_events(events);
        for event in events.iter() {
            if let Event::Remove { start, end } = event {
                for range in self.layout.offsets(*start..*end) {
                    self.removed.add(range);
                }
            }
        }
        drop(gate);
        debug_assert!(events.len() <= EVENTS);
        match outcome {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => self.fail(format!("page faults can no longer be read: {error}")),
        }
        let read_at = if events.is_empty() { 0 } else { monotonic_ns() };
        faults.extend(events.iter().filter_map(|event| match event {
            Event::Fault { address, .. } => Some(Fault {
                address: *address,
                read_at,
            }),
            _ => None,
        }));
    }

    /// Whether a fault waits for a chunk that is still elsewhere.
    pub(crate) fn is_elsewhere(&self, fault: Fault) -> bool {
        if self.image.is_whole() {
            return false;
        }
        let Some((offset, region)) = self.layout.find(fault.address) else {
            return false;
        };
        // What was given up reads as zero, whatever the image has.
        !self.removed.contains(offset - offset % region.page) && !self.is_here(offset / self.unit)
    }

    /// Whether a unit can be read without waiting for others.
    pub(crate) fn is_here(&self, unit: u64) -> bool {
        let chunks = self.chunks_of_unit();
        self.image.is_whole()
            || (unit * chunks..(unit + 1) * chunks).all(|chunk| {
                chunk * self.image.chunk_size() as u64 >= self.image.size()
                    || self.image.is_here(chunk as u32)
            })
    }

    /// Serves a fault; with [`Stop::Changing`] it must be tried again, after
    /// events were read.
    pub(crate) fn serve(&self, fault: Fault, scratch: &mut Scratch) -> Result<(), Stop> {
        let Some((offset, region)) = self.layout.find(fault.address) else {
            return Err(Stop::Failed(format!(
                "a page fault at address {:#x} is in no mapping of the handshake",
                fault.address
            )));
        };
        let page = offset - offset % region.page..offset - offset % region.page + region.page;
        let unit = offset / self.unit;
        let mut met = Met(false);
        if !self.removed.contains(page.start) {
            if let Some(touched) = &self.touched {
                touched.add(offset);
            }
            met = self.fill_unit(unit, Some(offset), scratch)?;
        }
        // Given up before, or while the unit was read.
        if self.removed.contains(page.start) {
            met.0 |= self.fill_removed(page.clone())?.0;
        }
        if met.0 {
            self.wake(page);
        }
        self.counters.fault(fault.read_at);
        Ok(())
    }

    /// The units around a fault, a window of so many bytes, but not itself.
    pub(crate) fn around(&self, fault: Fault, window: u64) -> Range<u64> {
        let Some((offset, _)) = self.layout.find(fault.address) else {
            return 0..0;
        };
        let units = (window / self.unit).max(1);
        let first = offset / self.unit / units * units;
        first..(first + units).min(self.units())
    }

    pub(crate) fn counters(&self) -> &Counters {
        &self.counters
    }
}

impl AsFd for Vm {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.uffd.as_fd()
    }
}

/// What was done for a VM, counted by all workers.
#[derive(Debug, Default)]
pub struct Counters {
    faults: AtomicU64,
    fault_ns: AtomicU64,
    prefetched_chunks: AtomicU64,
    bytes_read: AtomicU64,
    bytes_filled: AtomicU64,
    bytes_shared: AtomicU64,
    first_fault_ns: AtomicU64,
}

impl Counters {
    fn fault(&self, read_at: u64) {
        self.faults.fetch_add(1, Ordering::Relaxed);
        let took = monotonic_ns().saturating_sub(read_at);
        self.fault_ns.fetch_add(took, Ordering::Relaxed);
        if self.first_fault_ns.load(Ordering::Relaxed) == 0 {
            let _ = self.first_fault_ns.compare_exchange(
                0,
                read_at,
                Ordering::Relaxed,
                Ordering::Relaxed,
            );
        }
    }

    pub(crate) fn read(&self, bytes: u64) {
        self.bytes_read.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn prefetched(&self, chunks: u64) {
        self.prefetched_chunks.fetch_add(chunks, Ordering::Relaxed);
    }

    fn filled(&self, bytes: u64) {
        self.bytes_filled.fetch_add(bytes, Ordering::Relaxed);
    }

    fn shared(&self, bytes: u64) {
        self.bytes_shared.fetch_add(bytes, Ordering::Relaxed);
    }

    /// As they are now.
    pub fn stats(&self, failed: Option<String>) -> PagerStats {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        PagerStats {
            faults: of(&self.faults),
            fault_ns: of(&self.fault_ns),
            prefetched_chunks: of(&self.prefetched_chunks),
            bytes_read: of(&self.bytes_read),
            bytes_filled: of(&self.bytes_filled),
            bytes_shared: of(&self.bytes_shared),
            failed,
            bytes_fetched: 0,
            first_fault_ns: of(&self.first_fault_ns),
        }
    }
}
