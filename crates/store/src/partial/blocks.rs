//! The blocks of a partial image.

use super::{Bytes, Origin, OriginError};
use crate::error::Fault;
use crate::format::{Footer, header};
use crate::presence::PresenceMap;
use crate::sparse::{Claim, Flight, SparseFile};
use crate::stop::Stop;
use jiffy_sys::locked::Locked;
use jiffy_sys::mutex::{read, write};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::slice::from_ref;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, RwLock};
use std::thread;
use std::time::Duration;

/// Bytes of a block.
pub const BLOCK: u32 = 64 << 10;
/// Most bytes that an origin is asked for at once.
pub const FETCH_MAX: u64 = 4 << 20;
/// How often all origins are asked, as long as one of them may succeed on a retry.
const MAX_ROUNDS: u32 = 3;
/// The pause before the second round; it doubles each time.
const RETRY_PAUSE: Duration = Duration::from_millis(100);
/// The error of an origin whose bytes do not have the image's hash.
const WRONG_BYTES: &str = "it gave bytes that do not match the image";
/// How often a read is retried after others dropped its blocks, and how often a whole image is
/// checked again after a part of it was wrong.
pub(crate) const MAX_TRIES: u32 = 16;

/// The file of a partial image, and its origins. Safe to use from many threads.
pub struct PartialFile {
    sparse: SparseFile<Outcome>,
    /// Identifies this file among all partial files of the process.
    number: u64,
    origins: RwLock<Vec<Arc<RatedOrigin>>>,
    fetched: AtomicU64,
    rejected: AtomicU64,
    /// How many threads are completing the image.
    completing: AtomicUsize,
    whole: AtomicBool,
}

/// The outcome of fetching blocks: their bytes, or why no origin gave them.
type Outcome = Result<Fetched, Arc<Missing>>;

/// Bytes that were fetched and are still in memory.
#[derive(Debug, Clone)]
pub(crate) struct Fetched {
    /// Number of the [`PartialFile`] they belong to.
    file: u64,
    /// Offset of the first byte in the file.
    start: u64,
    bytes: Bytes,
}

impl Fetched {
    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// The bytes of a range of the file, if all of them are among these bytes.
    pub fn find(&self, file: &PartialFile, range: &Range<u64>) -> Option<Found> {
        let start = range.start.checked_sub(self.start)? as usize;
        let end = range.end.checked_sub(self.start)? as usize;
        let is_local = self.file == file.number && end <= self.bytes.len();
        is_local.then(|| Found(self.bytes.clone(), start..end))
    }
}

/// Some of the bytes that were fetched.
pub(crate) struct Found(Bytes, Range<usize>);

impl std::ops::Deref for Found {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0[self.1.clone()]
    }
}

/// An origin, and how often it failed. The one with the fewest failures is tried first.
struct RatedOrigin {
    origin: Arc<dyn Origin>,
    failures: AtomicU32,
}

/// Why no origin gave the bytes.
#[derive(Debug, Clone)]
pub(crate) struct Missing {
    pub bytes: Range<u64>,
    pub tried: String,
    /// The read was cancelled.
    given_up: bool,
    /// Bytes that were fetched but could not be written.
    unwritten: Option<Fetched>,
}

impl Missing {
    pub fn new(bytes: Range<u64>, tried: impl Into<String>) -> Missing {
        Missing {
            bytes,
            tried: tried.into(),
            given_up: false,
            unwritten: None,
        }
    }
}

/// Why fetched bytes were refused.
enum Refused {
    /// They are not the image's.
    Wrong,
    /// They cannot be written here.
    Unwritten(io::Error),
}

impl From<Missing> for Fault {
    fn from(missing: Missing) -> Fault {
        Fault::Unavailable {
            chunk: None,
            offset: missing.bytes.start,
            length: missing.bytes.end - missing.bytes.start,
            tried: missing.tried,
        }
    }
}

/// Blocks that one thread is replacing: no other thread fetches or replaces them.
pub(crate) struct Replacing<'a> {
    file: &'a PartialFile,
    flight: Arc<Flight<Outcome>>,
}

impl Drop for Replacing<'_> {
    fn drop(&mut self) {
        // Threads that wait for other chunks of these blocks try again.
        let outcome = Err(Arc::new(Missing {
            given_up: true,
            ..Missing::new(0..0, "they were replaced")
        }));
        self.file.sparse.end_flight(&self.flight, outcome);
    }
}

impl PartialFile {
    /// `map` must be one of this file.
    pub(crate) fn new(
        file: File,
        length: u64,
        footer: &Footer,
        map: PresenceMap,
        origins: Vec<Arc<dyn Origin>>,
    ) -> Result<PartialFile, Fault> {
        let head = map.header();
        let fits = head.length == length
            && head.image == footer.id.0
            && head.tail <= footer.data_end()
            && head.tail >= header::BYTES as u64;
        if !fits {
            return Err(Fault::Map {
                path: map.path().to_owned(),
                why: "it is the map of another file".into(),
            });
        }
        map.touch();
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        let mapped = header::BYTES as u64..head.tail;
        Ok(PartialFile {
            sparse: SparseFile::new(Locked::held_elsewhere(file), map, mapped),
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            origins: RwLock::new(rated(origins)),
            fetched: AtomicU64::new(0),
            rejected: AtomicU64::new(0),
            completing: AtomicUsize::new(0),
            whole: AtomicBool::new(false),
        })
    }

    /// Replaces the origins.
    pub(crate) fn set_origins(&self, origins: Vec<Arc<dyn Origin>>) {
        *write(&self.origins) = rated(origins);
    }

    /// The registries that its origins wait for.
    pub(crate) fn waits_for(&self) -> Vec<String> {
        let origins = read(&self.origins);
        origins.iter().map(|it| it.origin.waits_for()).collect()
    }

    /// Until `end_completing`, no chunks are dropped to make room for others.
    pub(crate) fn begin_completing(&self) {
        self.completing.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn end_completing(&self) {
        self.completing.fetch_sub(1, Ordering::AcqRel);
    }

    /// Bytes that came from origins.
    pub fn fetched(&self) -> u64 {
        self.fetched.load(Ordering::Relaxed)
    }

    /// Whether these bytes of the file are here.
    pub fn has(&self, bytes: &Range<u64>) -> bool {
        self.sparse.has(bytes)
    }

    /// Bytes that are not here.
    pub fn missing(&self) -> u64 {
        let mut missing = 0;
        let mut at = 0;
        let end = self.all_blocks().end;
        while let Some(run) = self.sparse.map().next_missing(at..end) {
            let bytes = self.bytes_of(&run);
            missing += bytes.end - bytes.start;
            at = run.end;
        }
        missing
    }

    /// Makes these bytes of the file present, no matter which thread fetches them. Returns the
    /// bytes that were fetched last, if any.
    pub(crate) fn fetch(
        &self,
        bytes: &Range<u64>,
        stop: &Stop,
    ) -> Result<Option<Fetched>, Missing> {
        let blocks = self.sparse.units_of(bytes);
        let mut fetched = None;
        loop {
            let outcome = match self.sparse.claim(&blocks, FETCH_MAX / u64::from(BLOCK)) {
                Claim::Nothing => return Ok(fetched),
                Claim::Fill(flight) => {
                    let outcome = self.fetch_blocks(&flight.units(), stop).map_err(Arc::new);
                    self.sparse.end_flight(&flight, outcome.clone());
                    outcome
                }
                Claim::Wait(flight) => {
                    let outcome = self.sparse.wait(&flight);
                    // Retry if the other thread fetched more blocks, because these alone may
                    // succeed, or if its read was cancelled.
                    let in_flight = flight.units();
                    let more = blocks.end - blocks.start < in_flight.end - in_flight.start;
                    let should_retry = |missing: &Arc<Missing>| {
                        let failed = more && missing.unwritten.is_none();
                        (failed || missing.given_up) && !stop.is_cancelled()
                    };
                    if outcome.as_ref().is_err_and(should_retry) {
                        continue;
                    }
                    outcome
                }
            };
            fetched = Some(outcome.map_err(|missing| (*missing).clone())?);
        }
    }

    /// These bytes of the file if they had to be fetched, even if they could not be written. `None`
    /// if they are in the file.
    pub(crate) fn fetch_into_memory(
        &self,
        bytes: &Range<u64>,
        stop: &Stop,
    ) -> Result<Option<Fetched>, Missing> {
        match self.fetch(bytes, stop) {
            Err(Missing {
                unwritten: Some(fetched),
                ..
            }) if fetched.find(self, bytes).is_some() => Ok(Some(fetched)),
            Err(missing) if missing.unwritten.is_some() => {
                // The bytes that could not be written do not cover the whole range.
                let mut all = None;
                self.fetch_from_origins(bytes, stop, &mut |given| {
                    all = Some(given.clone());
                    Ok(())
                })?;
                Ok(all)
            }
            fetched => fetched,
        }
    }

    /// Reads bytes of the file, after fetching what is missing.
    pub(crate) fn read(&self, offset: u64, into: &mut [u8], stop: &Stop) -> Result<(), Fault> {
        let bytes = offset..offset.saturating_add(into.len() as u64);
        for _ in 0..MAX_TRIES {
            match self.sparse.read(offset, into) {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(source) => {
                    return Err(Fault::Read {
                        offset,
                        length: into.len() as u64,
                        source,
                    });
                }
            }
            let fetched = self.fetch_into_memory(&bytes, stop)?;
            if let Some(found) = fetched.and_then(|fetched| fetched.find(self, &bytes)) {
                into.copy_from_slice(&found);
                return Ok(());
            }
        }
        Err(Missing::new(bytes, "other threads reject them repeatedly").into())
    }

    /// Drops all fetched chunks, which can be fetched again, to make room for bytes that a reader
    /// waits for. Does nothing while the image is being completed.
    pub(crate) fn drop_fetched(&self) {
        if self.completing.load(Ordering::Acquire) > 0 || self.whole.load(Ordering::Acquire) {
            return;
        }
        self.rejected.fetch_add(1, Ordering::Relaxed);
        // On an error the blocks stay, which does no harm.
        let _ = self.sparse.drop_units(from_ref(&self.all_blocks()), false);
    }

    /// Waits until no thread fetches or replaces any of the blocks of these bytes, and reserves
    /// them, so that only one of many readers of a wrong chunk replaces it.
    pub(crate) fn begin_replacing(&self, bytes: &Range<u64>) -> Replacing<'_> {
        let flight = self.sparse.claim_exclusive(self.sparse.units_of(bytes));
        Replacing { file: self, flight }
    }

    /// Reads bytes of the file if all of them are here.
    pub(crate) fn read_present(&self, offset: u64, into: &mut [u8]) -> bool {
        self.sparse.read(offset, into).unwrap_or(false)
    }

    /// Drops these bytes, because they are not the image's.
    pub(crate) fn reject(&self, bytes: &Range<u64>) {
        self.rejected.fetch_add(1, Ordering::Relaxed);
        // If the map cannot be written, the hash shows the same error at the next read.
        let _ = self
            .sparse
            .drop_units(&[self.sparse.units_of(bytes)], false);
    }

    /// How often bytes were found wrong. Waits until nothing is being fetched: if all blocks are
    /// present, none is dropped later unless this number grows.
    pub(crate) fn rejections(&self) -> u64 {
        self.sparse.wait_for_all();
        self.rejected.load(Ordering::Relaxed)
    }

    /// Fetches bytes from one origin after the other until `is_valid` accepts them; only those
    /// bytes, and the rest of their blocks, are kept.
    pub(crate) fn replace(
        &self,
        bytes: &Range<u64>,
        stop: &Stop,
        is_valid: &mut dyn FnMut(&[u8]) -> bool,
    ) -> Result<(), Missing> {
        let blocks = self.sparse.units_of(bytes);
        let around = self.bytes_of(&blocks);
        if bytes.start < around.start || bytes.end > around.end {
            let tried = "they came with the image's tables and do not match the image";
            return Err(Missing::new(bytes.clone(), tried));
        }
        let wanted = (bytes.start - around.start) as usize..(bytes.end - around.start) as usize;
        self.fetch_from_origins(&around, stop, &mut |given| {
            if !is_valid(&given.bytes[wanted.clone()]) {
                return Err(Refused::Wrong);
            }
            // If this fails, the caller still has the bytes; the next reader fetches them again.
            let _ = self.sparse.put(blocks.clone(), &given.bytes);
            Ok(())
        })
        .map(drop)
    }

    /// Turns the file into an ordinary image: all blocks are present and were checked.
    pub(crate) fn finish(&self) -> io::Result<()> {
        self.sparse.file().sync_all()?;
        let map = self.sparse.map();
        // Another image may have taken this one's name, and its map is needed.
        if !self.whole.swap(true, Ordering::AcqRel) && map.has_its_name()? {
            std::fs::remove_file(map.path())?;
            jiffy_sys::durable::sync_folder_of(map.path())?;
        }
        Ok(())
    }

    /// Blocks that have chunks.
    pub(crate) fn all_blocks(&self) -> Range<u64> {
        self.sparse.all_units()
    }

    /// The bytes of some blocks that belong to chunks.
    pub(crate) fn bytes_of(&self, blocks: &Range<u64>) -> Range<u64> {
        self.sparse.bytes_of(blocks)
    }

    /// Fetches a run of blocks from the first origin that gives it.
    fn fetch_blocks(&self, blocks: &Range<u64>, stop: &Stop) -> Result<Fetched, Missing> {
        let bytes = self.bytes_of(blocks);
        self.fetch_from_origins(&bytes, stop, &mut |given| {
            self.sparse.put(blocks.clone(), &given.bytes).or_else(|_| {
                self.drop_fetched();
                let kept = self.sparse.put(blocks.clone(), &given.bytes);
                kept.map_err(Refused::Unwritten)
            })
        })
    }

    /// Tries one origin after the other, and repeats those that may succeed on a retry, until
    /// `take` accepts the bytes of one.
    fn fetch_from_origins(
        &self,
        bytes: &Range<u64>,
        stop: &Stop,
        take: &mut dyn FnMut(&Fetched) -> Result<(), Refused>,
    ) -> Result<Fetched, Missing> {
        let length = bytes.end - bytes.start;
        let mut origins = read(&self.origins).clone();
        origins.sort_by_key(|rated| rated.failures.load(Ordering::Relaxed));
        let mut answers: Vec<OriginError> = origins
            .iter()
            .map(|_| OriginError::transient("it was not asked"))
            .collect();
        for round in 0..MAX_ROUNDS {
            if !answers.iter().any(|answer| answer.again) {
                break;
            }
            if round > 0 {
                thread::sleep(RETRY_PAUSE * (1 << (round - 1)));
            }
            let open = origins.iter().zip(&mut answers);
            for (rated, answer) in open.filter(|(_, answer)| answer.again) {
                if stop.is_cancelled() {
                    return Err(Missing {
                        given_up: true,
                        ..Missing::new(bytes.clone(), "the read was cancelled")
                    });
                }
                *answer = match rated.origin.fetch(bytes.clone(), stop) {
                    Ok(given) if given.len() as u64 == length => {
                        self.fetched.fetch_add(length, Ordering::Relaxed);
                        let given = Fetched {
                            file: self.number,
                            start: bytes.start,
                            bytes: given,
                        };
                        match take(&given) {
                            Ok(()) => return Ok(given),
                            Err(Refused::Wrong) => OriginError::permanent(WRONG_BYTES),
                            Err(Refused::Unwritten(error)) => {
                                let from = rated.origin.name();
                                let why = format!(
                                    "{from}: its bytes cannot be stored on this node: {error}"
                                );
                                return Err(Missing {
                                    unwritten: Some(given),
                                    ..Missing::new(bytes.clone(), why)
                                });
                            }
                        }
                    }
                    Ok(given) => OriginError::transient(format!(
                        "it gave {} bytes instead of {length}",
                        given.len()
                    )),
                    Err(error) => error,
                };
                // A read that was cancelled is not a failure of the origin.
                if !stop.is_cancelled() {
                    rated.failures.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        let reports: Vec<String> = origins
            .iter()
            .zip(&answers)
            .map(|(rated, answer)| format!("{}: {answer}", rated.origin.name()))
            .collect();
        let tried = match &reports[..] {
            [] => "it is not on this node, and no origin is known".into(),
            reports => reports.join("; "),
        };
        Err(Missing {
            given_up: stop.is_cancelled(),
            ..Missing::new(bytes.clone(), tried)
        })
    }
}

fn rated(origins: Vec<Arc<dyn Origin>>) -> Vec<Arc<RatedOrigin>> {
    let rated = |origin| RatedOrigin {
        origin,
        failures: AtomicU32::new(0),
    };
    origins.into_iter().map(rated).map(Arc::new).collect()
}

impl Drop for PartialFile {
    fn drop(&mut self) {
        if !self.whole.load(Ordering::Acquire) {
            self.sparse.map().touch();
        }
    }
}
