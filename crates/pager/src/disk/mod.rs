//! A disk whose cache is filled as its VMMs ask for it.
//!
//! * `fill`: fills chunks from the image into the cache, each by one thread at a time.
//! * `room`: what happens when the file system is full.
//! * `ahead`: readahead for sequential reads.

mod ahead;
mod fill;
mod room;
#[cfg(test)]
mod tests;

use crate::image::{ChunkImage, StoredImage};
use crate::io_pool::{IoPool, Urgency};
use crate::scratch::Scratch;
use crate::vm::Touched;
use ahead::Ahead;
use fill::FillError;
use jiffy_store::disk_cache::CacheError;
use jiffy_store::{DiskCache, Recording, Stop, runs};
use jiffy_sys::clock::monotonic_ns;
use jiffy_sys::log_limit::LogLimit;
use jiffy_sys::mutex::lock;
use jiffy_wire::disk::REQUEST_BYTES_MAX;
use jiffy_wire::pager::PagerStats;
use room::OnFullDisk;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// About how many bytes of the disk one task of a prefetch fills.
const PIECE: u64 = 4 << 20;
/// Largest gap in the file between two chunks, bytes, that is fetched with them.
const GAP: u64 = 64 << 10;

/// Bytes of a disk that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unavailable {
    /// The first such chunk; `None` if the error is not about a chunk.
    pub chunk: Option<u32>,
    /// One sentence.
    pub sentence: String,
}

/// The result of a VMM's request.
#[derive(Debug, PartialEq, Eq)]
pub enum DemandOutcome {
    /// They are in the cache.
    Present,
    /// There is no disk space for them in the cache; these are the first of them.
    Bytes(Vec<u8>),
}

/// Called at the end of a long task, with the first problem.
type Done = Box<dyn FnOnce(Option<String>) + Send>;

/// A disk, its image and its cache. Shared by the threads that fill it.
pub struct Disk {
    name: String,
    image: Arc<StoredImage>,
    cache: DiskCache,
    ahead: Mutex<Ahead>,
    /// The chunks that were requested, while they are recorded.
    touched: Option<Touched>,
    recording: AtomicBool,
    ended: Stop,
    /// When the lack of disk space was last logged.
    full_disk_logged: Mutex<Option<Instant>>,
    /// Limits the messages about chunks that are fetched ahead, which VMMs cause.
    ahead_log: LogLimit,
    counters: Counters,
}

#[derive(Default)]
struct Counters {
    requests: AtomicU64,
    request_ns: AtomicU64,
    first_ns: AtomicU64,
    ahead_chunks: AtomicU64,
    bytes_read: AtomicU64,
    bytes_filled: AtomicU64,
}

impl Disk {
    /// Opens the cache in `folder` for the disk in `image`.
    ///
    /// # Errors
    ///
    /// If the cache can't be read or written, another process fills it, or it is another image's
    /// and a VM uses it.
    pub fn open(
        name: &str,
        image: Arc<StoredImage>,
        folder: &Path,
        record: bool,
    ) -> Result<Disk, CacheError> {
        let reader = image.reader();
        let cache = DiskCache::open(folder, reader)?;
        let chunk_size = reader.chunk_size() as usize;
        Ok(Disk {
            name: name.to_owned(),
            ahead: Mutex::new(Ahead::new(chunk_size as u64, cache.chunks())),
            touched: record.then(|| Touched::new(reader.size(), chunk_size)),
            recording: AtomicBool::new(record),
            ended: Stop::new(),
            full_disk_logged: Mutex::default(),
            ahead_log: LogLimit::new(),
            counters: Counters::default(),
            image,
            cache,
        })
    }

    /// Its name in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The lane of tasks that fill it: the registries that they may wait for.
    pub fn lane(&self) -> String {
        self.image.reader().waits_for()
    }

    /// The lane for a request of these bytes: that of the registries it may wait for, or, if the
    /// bytes are in the cache or in the image's file, a second lane beside it. Tasks in the second
    /// lane wait for a registry only briefly, if another thread is filling the same chunks.
    pub fn lane_of(&self, offset: u64, length: u64) -> String {
        let is_local = |chunk| self.cache.has(chunk) || self.image.is_local(chunk);
        let lane = self.lane();
        match self.check(offset, length) {
            Ok(chunks) if chunks.clone().all(is_local) => format!("here, {lane}"),
            _ => lane,
        }
    }

    /// Its cache.
    pub fn cache(&self) -> &DiskCache {
        &self.cache
    }

    /// Makes bytes of the disk present in the cache, for a VMM that waits for them, and then starts
    /// readahead. If there is no disk space, a VMM that takes bytes gets them from memory.
    ///
    /// # Errors
    ///
    /// If [`Disk::check`] refuses the request, a chunk can't be read, or the disk was closed;
    /// without `takes_bytes` also if the cache can't be written.
    pub fn demand(
        self: &Arc<Disk>,
        io_pool: &IoPool,
        offset: u64,
        length: u64,
        takes_bytes: bool,
        scratch: &mut Scratch,
    ) -> Result<DemandOutcome, Unavailable> {
        let begun = monotonic_ns();
        let chunks = self.check(offset, length)?;
        if self.is_recording() {
            self.touch(chunks.clone());
        }
        let on_full_disk = match takes_bytes {
            true => OnFullDisk::GiveUp,
            false => OnFullDisk::Wait,
        };
        let outcome = match self.fill(chunks.clone(), on_full_disk, scratch) {
            Ok(()) => {
                self.read_ahead(io_pool, chunks);
                Ok(DemandOutcome::Present)
            }
            Err(FillError::Unwritten(unwritten)) if takes_bytes => {
                self.read_without_cache(offset, length, &unwritten, scratch)
            }
            Err(error) => Err(error.into()),
        };
        self.counters.request(begun);
        outcome
    }

    /// Checks a request for `length` bytes at `offset`, and returns its chunks.
    ///
    /// # Errors
    ///
    /// If `length` is not 1 to `REQUEST_BYTES_MAX`, or the bytes are not within the disk.
    pub fn check(&self, offset: u64, length: u64) -> Result<Range<u32>, Unavailable> {
        let end = offset.checked_add(length);
        match end.filter(|end| *end <= self.cache.length()) {
            Some(end) if (1..=REQUEST_BYTES_MAX).contains(&length) => {
                Ok(self.cache.chunks_of(&(offset..end)))
            }
            _ => Err(Unavailable {
                chunk: None,
                sentence: format!(
                    "a request for {length} bytes at {offset} is refused: it must be for 1 to \
                     {REQUEST_BYTES_MAX} bytes within the disk, which has {} bytes",
                    self.cache.length()
                ),
            }),
        }
    }

    /// Whether requests are recorded.
    fn is_recording(&self) -> bool {
        self.recording.load(Ordering::Acquire)
    }

    fn touch(&self, chunks: Range<u32>) {
        if let Some(touched) = &self.touched {
            let size = u64::from(self.image.reader().chunk_size());
            for chunk in chunks {
                touched.add(u64::from(chunk) * size);
            }
        }
    }

    fn read_ahead(self: &Arc<Disk>, io_pool: &IoPool, chunks: Range<u32>) {
        // Reading a whole image is as fast as the cache, so nothing is read ahead and the recording
        // is exact.
        let exact = self.is_recording() && !self.image.reader().is_partial();
        let next = lock(&self.ahead).after(chunks);
        if exact || next.is_empty() || self.cache.has_all(next.clone()) {
            return;
        }
        if self.is_recording() {
            self.touch(next.clone());
        }
        let disk = self.clone();
        io_pool.push(Urgency::Ahead, self.lane(), move |scratch| {
            let chunks: Vec<u32> = next.collect();
            disk.fill_ahead(&chunks, OnFullDisk::GiveUp, scratch);
        });
    }

    /// Prefetches the chunks of a recorded boot, or the image's working set, in a few large pieces
    /// at once.
    pub fn prefetch(self: &Arc<Disk>, io_pool: &IoPool, recording: Option<&Path>) {
        let chunks = match recording.map(|path| self.read_recording(path)) {
            Some(Some(chunks)) => chunks,
            _ => match self.image.reader().working_set() {
                Ok(ranges) => ranges.into_iter().flatten().collect(),
                Err(error) => {
                    tracing::warn!(disk = self.name, "the working set can't be read: {error}");
                    return;
                }
            },
        };
        for piece in self.pieces(chunks) {
            let disk = self.clone();
            io_pool.push(Urgency::Ahead, self.lane(), move |scratch| {
                disk.fill_ahead(&piece, OnFullDisk::GiveUp, scratch);
            });
        }
    }

    /// Fills everything that is missing.
    pub fn complete(self: &Arc<Disk>, io_pool: &IoPool, done: Done) {
        let pieces = self.pieces((0..self.cache.chunks()).collect());
        if pieces.is_empty() {
            return done(None);
        }
        let left = Arc::new((
            AtomicUsize::new(pieces.len()),
            Mutex::new((None, Some(done))),
        ));
        for piece in pieces {
            let (disk, left) = (self.clone(), left.clone());
            io_pool.push(Urgency::Ahead, self.lane(), move |scratch| {
                // There may be very many pieces: after the first problem, such as a full disk, the
                // others are skipped.
                let problem = match lock(&left.1).0.is_some() {
                    true => None,
                    false => disk.fill_ahead(&piece, OnFullDisk::Wait, scratch),
                };
                let mut end = lock(&left.1);
                end.0 = end.0.take().or(problem.map(|problem| problem.sentence));
                if left.0.fetch_sub(1, Ordering::AcqRel) == 1
                    && let Some(done) = end.1.take()
                {
                    done(end.0.take());
                }
            });
        }
    }

    /// The chunks that earlier boots requested; `None` if unknown.
    fn read_recording(&self, path: &Path) -> Option<Vec<u32>> {
        let recording = match Recording::read(path) {
            Ok(recording) => recording,
            Err(error) => {
                if error.kind() != std::io::ErrorKind::NotFound {
                    tracing::warn!(disk = self.name, "{}: {error}", path.display());
                }
                return None;
            }
        };
        let reader = self.image.reader();
        if recording.image != reader.id() || recording.chunk_size != reader.chunk_size() {
            tracing::warn!(
                disk = self.name,
                "the recording {} is of another image",
                path.display()
            );
            return None;
        }
        Some(recording.chunks)
    }

    /// Divides missing chunks into pieces that are contiguous in the file, in the order of need.
    fn pieces(&self, mut chunks: Vec<u32>) -> Vec<Vec<u32>> {
        let reader = self.image.reader();
        chunks.retain(|chunk| *chunk < self.cache.chunks() && !self.cache.has(*chunk));
        let mut places: Vec<(Range<u64>, usize, u32)> = chunks
            .iter()
            .enumerate()
            .map(|(order, chunk)| {
                // A chunk that is not stored costs no read here. If its entry is damaged, reading
                // it reports that.
                let place = reader.stored_range(*chunk).ok().flatten().unwrap_or(0..0);
                (place, order, *chunk)
            })
            .collect();
        places.sort_by_key(|(place, order, _)| (place.start, *order));
        let places = places
            .into_iter()
            .map(|(place, order, chunk)| (place, (order, chunk)));
        let most = (PIECE / u64::from(reader.chunk_size())).max(1) as usize;
        let mut pieces: Vec<Vec<(usize, u32)>> = runs::join(places, GAP, u64::MAX)
            .into_iter()
            .flat_map(|(_, run)| run.chunks(most).map(<[_]>::to_vec).collect::<Vec<_>>())
            .collect();
        pieces.sort_by_key(|piece| piece.iter().map(|(order, _)| *order).min());
        let chunks = |piece: Vec<(usize, u32)>| piece.into_iter().map(|(_, chunk)| chunk).collect();
        pieces.into_iter().map(chunks).collect()
    }

    /// Stops prefetching, and ends the requests that wait.
    pub fn end(&self) {
        self.ended.cancel();
    }

    fn has_ended(&self) -> bool {
        self.ended.is_cancelled()
    }

    /// Syncs and closes the cache, which is not filled any more.
    ///
    /// # Errors
    ///
    /// If the cache can't be synced.
    pub fn close(&self) -> Result<(), CacheError> {
        self.end();
        self.cache.close()
    }

    /// The chunks requested so far; with `last`, recording ends.
    pub fn recording(&self, last: bool) -> Option<Recording> {
        if last {
            self.recording.store(false, Ordering::Release);
        }
        let reader = self.image.reader();
        Some(Recording {
            image: reader.id(),
            chunk_size: reader.chunk_size(),
            chunks: self.touched.as_ref()?.chunks(),
        })
    }

    /// Statistics.
    pub fn stats(&self) -> PagerStats {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.counters;
        PagerStats {
            faults: of(&counters.requests),
            fault_ns: of(&counters.request_ns),
            prefetched_chunks: of(&counters.ahead_chunks),
            bytes_read: of(&counters.bytes_read),
            bytes_filled: of(&counters.bytes_filled),
            bytes_shared: 0,
            failed: None,
            bytes_fetched: self.image.reader().fetched_bytes(),
            first_fault_ns: of(&counters.first_ns),
        }
    }
}

impl Counters {
    fn request(&self, begun: u64) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        let took = monotonic_ns().saturating_sub(begun);
        self.request_ns.fetch_add(took, Ordering::Relaxed);
        let _ = self
            .first_ns
            .compare_exchange(0, begun, Ordering::Relaxed, Ordering::Relaxed);
    }
}
