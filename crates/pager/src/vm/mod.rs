//! One VM's memory: which pages are filled, and which were given up.

mod fill;
mod removed;
mod touched;

use fill::MetExisting;
pub(crate) use fill::PIECE;
pub use fill::Stop;
use jiffy_sys::log_limit::LogLimit;
use jiffy_sys::mutex::write;
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
use std::sync::{Arc, OnceLock, RwLock};

/// A VMM whose faults are served.
///
/// Memory is filled in units: a chunk of the image, or a page of the VM where that is larger. A
/// page that exists is never changed, so two workers may fill the same unit.
///
/// **Removals.** A page that the VM gives up must read as zero from then on, and must never get the
/// image's bytes again, even from a worker that has read them before. The kernel blocks the removal
/// until its event is read. So events are read with the gate locked for writing; every fill checks
/// the removed pages and calls the kernel with the gate locked for reading. No fill is running when
/// a removal becomes known, and each later fill sees it.
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
    /// Jobs that prefetch its memory.
    jobs: AtomicUsize,
    ended: jiffy_store::Stop,
    failure: OnceLock<String>,
    log: Arc<LogLimit>,
    on_failure: Box<dyn Fn(&str) + Send + Sync>,
}

/// What a [`Vm`] is made of.
pub struct VmParts {
    /// For messages.
    pub name: String,
    /// Unique in the process.
    pub token: u64,
    /// The userfaultfd, as received from the VMM.
    pub uffd: Userfaultfd,
    /// The layout that the handshake gave.
    pub layout: Layout,
    /// The image that its memory is filled from.
    pub image: Arc<dyn ChunkImage>,
    /// The pages that were given up, with those that a predecessor noted.
    pub removed: Removed,
    /// The counters to update.
    pub counters: Arc<Counters>,
    /// The recording, if one is made.
    pub touched: Option<Arc<Touched>>,
    /// Limits the messages about it, also those about its earlier connections.
    pub log: Arc<LogLimit>,
    /// Called once, from a worker, when an error ends the service of the VM.
    pub on_failure: Box<dyn Fn(&str) + Send + Sync>,
}

/// A fault that was read.
#[derive(Debug, Clone, Copy)]
pub struct Fault {
    /// The address in the VMM's memory.
    pub address: u64,
    /// Host CLOCK_MONOTONIC, nanoseconds.
    pub read_at: u64,
}

impl Vm {
    /// Prepares the service, and wakes all threads that wait: a predecessor may have read the
    /// events of their faults.
    ///
    /// # Errors
    ///
    /// If the userfaultfd can't wake the threads of a region.
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
            log: parts.log,
            on_failure: parts.on_failure,
        })
    }

    /// Its name in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Limits the messages about it.
    pub(crate) fn log(&self) -> &LogLimit {
        &self.log
    }

    /// Unique in the process.
    pub fn token(&self) -> u64 {
        self.token
    }

    pub(crate) fn image(&self) -> &Arc<dyn ChunkImage> {
        &self.image
    }

    /// The chunks of the image's working set that are still missing.
    pub(crate) fn working_set(&self) -> Vec<u32> {
        let mut chunks = self.image.working_set().unwrap_or_else(|error| {
            if self.log.admits() {
                tracing::warn!(vm = self.name, "the working set can't be read: {error}");
            }
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

    /// Number of chunks of the image in a unit.
    pub(crate) fn chunks_of_unit(&self) -> u64 {
        self.unit / self.image.chunk_size() as u64
    }

    pub(crate) fn is_filled(&self, unit: u64) -> bool {
        self.filled.get(unit)
    }

    /// Marks ranges of the image as filled: the VM maps them from the shared working set.
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

    /// Counts a job that fills its memory.
    pub(crate) fn begin_job(&self) {
        self.jobs.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes that a job has ended.
    pub(crate) fn end_job(&self) {
        self.jobs.fetch_sub(1, Ordering::Relaxed);
    }

    /// Whether a job is filling its memory.
    pub(crate) fn has_job(&self) -> bool {
        self.jobs.load(Ordering::Relaxed) > 0
    }

    /// Given up when the VM is not served any more, which ends the work done for it alone.
    pub fn stop(&self) -> &jiffy_store::Stop {
        &self.ended
    }

    /// Whether it is not served any more, or an error ended its service.
    pub fn has_ended(&self) -> bool {
        self.ended.is_cancelled()
    }

    /// Stops serving it.
    pub(crate) fn end(&self) {
        self.ended.cancel();
    }

    /// The error that ended its service.
    pub fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// Stops serving it because of an error. Only the first error is kept.
    pub(crate) fn fail(&self, sentence: String) {
        if self.has_ended() {
            return;
        }
        if self.failure.set(sentence).is_ok() {
            self.end();
            let sentence = self.failure.get().expect("just set");
            if self.log.admits() {
                tracing::error!(vm = %self.name, "{sentence}");
            }
            (self.on_failure)(sentence);
        }
    }

    /// Reads waiting events: notes the pages that were given up, and appends the faults.
    pub(crate) fn take_faults(&self, events: &mut Vec<Event>, faults: &mut Vec<Fault>) {
        events.clear();
        let gate = write(&self.gate);
        // More events may wait behind a full batch; the caller reads again until there are none.
        let outcome = self.uffd.read_events(events);
        for event in events.iter() {
            if let Event::Remove { start, end } = event {
                for range in self.layout.offsets(*start..*end) {
                    self.removed.add(range, &self.log);
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

    /// Whether a fault waits for a chunk that has to be fetched from an origin.
    pub(crate) fn needs_origin(&self, fault: Fault) -> bool {
        if self.image.is_whole() {
            return false;
        }
        let Some((offset, region)) = self.layout.find(fault.address) else {
            return false;
        };
        // A page that was given up reads as zero, whatever the image has.
        !self.removed.contains(offset - offset % region.page) && !self.is_local(offset / self.unit)
    }

    /// Whether a unit can be read without waiting for an origin.
    pub(crate) fn is_local(&self, unit: u64) -> bool {
        let chunks = self.chunks_of_unit();
        self.image.is_whole()
            || (unit * chunks..(unit + 1) * chunks).all(|chunk| {
                chunk * self.image.chunk_size() as u64 >= self.image.size()
                    || self.image.is_local(chunk as u32)
            })
    }

    /// Serves a fault. After [`Stop::Changing`] the caller must read the events and try again.
    pub(crate) fn serve(&self, fault: Fault, scratch: &mut Scratch) -> Result<(), Stop> {
        let Some((offset, region)) = self.layout.find(fault.address) else {
            return Err(Stop::Failed(format!(
                "a page fault at address {:#x} is in no mapping of the handshake",
                fault.address
            )));
        };
        let page = offset - offset % region.page..offset - offset % region.page + region.page;
        let unit = offset / self.unit;
        let mut met = MetExisting(false);
        if !self.removed.contains(page.start) {
            if let Some(touched) = &self.touched {
                touched.add(offset);
            }
            met = self.fill_unit(unit, Some(offset), scratch)?;
        }
        // The page was given up before, or while the unit was read.
        if self.removed.contains(page.start) {
            met.0 |= self.fill_removed(page.clone())?.0;
        }
        if met.0 {
            self.wake(page);
        }
        self.counters.fault(fault.read_at);
        Ok(())
    }

    /// The units in a window of so many bytes around a fault, which include its own unit.
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

/// Statistics of a VM, updated by all workers.
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

    /// The current values.
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
