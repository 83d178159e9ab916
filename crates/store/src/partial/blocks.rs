//! The blocks of a partial image.

use super::{Origin, OriginError};
use crate::error::Fault;
use crate::format::{Footer, header};
use crate::presence::PresenceMap;
use crate::stop::Stop;
use rustix::fs::{FallocateFlags, fallocate};
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::thread;
use std::time::Duration;

/// Bytes of a block.
pub const BLOCK: u32 = 64 << 10;
/// Bytes asked of an origin at once, at most.
pub const FETCH_MAX: u64 = 4 << 20;
/// Times that all origins are asked, if they may answer yet.
const ROUNDS: u32 = 3;
/// How long to wait before the second round; then twice as long.
const PAUSE: Duration = Duration::from_millis(100);
/// Said of an origin whose bytes do not have the image's hash.
const WRONG: &str = "it gave bytes that are not the image's";
/// Times a read begins anew because others have dropped its blocks, and a whole image is
/// checked anew because a part of it was wrong.
pub(crate) const TRIES: u32 = 16;

/// The file of a partial image, and who has the rest. Used by many threads.
pub struct PartialFile {
    file: File,
    map: PresenceMap,
    origins: RwLock<Vec<Arc<Known>>>,
    /// Blocks that are being fetched.
    flights: Mutex<HashMap<u64, Arc<Flight>>>,
    landed: Condvar,
    /// Held for reading while blocks that are there are read, for writing
    /// while some are dropped: nobody reads a hole for a block.
    gate: RwLock<()>,
    fetched: AtomicU64,
    rejected: AtomicU64,
    /// How many want all of it to stay.
    completing: AtomicUsize,
    whole: AtomicBool,
}

/// An origin, and how often it had not what it was asked for. Who failed least is
/// asked first.
struct Known {
    origin: Arc<dyn Origin>,
    failures: AtomicU32,
}

/// Blocks that one thread fetches.
struct Flight {
    blocks: Range<u64>,
    outcome: OnceLock<Result<(), Arc<Missing>>>,
}

/// Bytes that nobody gives: who was asked, and why not.
#[derive(Debug, Clone)]
pub(crate) struct Missing {
    pub bytes: Range<u64>,
    pub tried: String,
    /// Nobody wanted them any more.
    given_up: bool,
    /// They came, and could not be written.
    unkept: Option<Arc<Vec<u8>>>,
}

impl Missing {
    pub fn new(bytes: Range<u64>, tried: impl Into<String>) -> Missing {
        Missing {
            bytes,
            tried: tried.into(),
            given_up: false,
            unkept: None,
        }
    }

    /// These bytes, if they came and could not be written.
    fn unkept(&self, wanted: &Range<u64>) -> Option<&[u8]> {
        let start = wanted.start.checked_sub(self.bytes.start)?;
        let end = wanted.end.checked_sub(self.bytes.start)?;
        self.unkept.as_ref()?.get(start as usize..end as usize)
    }
}

/// Why bytes that came were not taken.
enum Refused {
    /// They are not the image's.
    Wrong,
    /// They cannot be written here.
    Unkept(io::Error),
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

/// Blocks that one thread replaces: nobody else fetches or replaces them.
pub(crate) struct Replacing<'a> {
    file: &'a PartialFile,
    flight: Arc<Flight>,
}

impl Drop for Replacing<'_> {
    fn drop(&mut self) {
        // Who waits for other chunks of these blocks looks for himself.
        let outcome = match self.file.map.has_all(self.flight.blocks.clone()) {
            true => Ok(()),
            false => Err(Arc::new(Missing {
                given_up: true,
                ..Missing::new(0..0, "they were wrong")
            })),
        };
        self.file.land(&self.flight, outcome);
    }
}

enum Claim {
    Nothing,
    Fetch(Arc<Flight>),
    Wait(Arc<Flight>),
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
        Ok(PartialFile {
            file,
            map,
            origins: RwLock::new(known(origins)),
            flights: Mutex::default(),
            landed: Condvar::new(),
            gate: RwLock::default(),
            fetched: AtomicU64::new(0),
            rejected: AtomicU64::new(0),
            completing: AtomicUsize::new(0),
            whole: AtomicBool::new(false),
        })
    }

    /// Asks others from now on.
    pub(crate) fn set_origins(&self, origins: Vec<Arc<dyn Origin>>) {
        *self.origins.write().unwrap_or_else(PoisonError::into_inner) = known(origins);
    }

    /// Whom its origins wait for.
    pub(crate) fn waits_for(&self) -> Vec<String> {
        let origins = self.origins.read().unwrap_or_else(PoisonError::into_inner);
        origins.iter().map(|it| it.origin.waits_for()).collect()
    }

    /// Until the other is called, nothing gives way to what cannot be written.
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
        self.map.has_all(self.blocks(bytes))
    }

    /// Bytes that are not here.
    pub fn missing(&self) -> u64 {
        let mut missing = 0;
        let mut at = 0;
        while let Some(run) = self.map.next_missing(at..self.all_blocks().end) {
            let bytes = self.clip(&self.map.bytes_of(&run));
            missing += bytes.end - bytes.start;
            at = run.end;
        }
        missing
    }

    /// Has these bytes of the file here, whoever fetches them.
    pub(crate) fn fetch(&self, bytes: &Range<u64>, stop: &Stop) -> Result<(), Missing> {
        let blocks = self.blocks(bytes);
        while !self.map.has_all(blocks.clone()) {
            let (flight, outcome) = match self.claim(&blocks) {
                Claim::Nothing => continue,
                Claim::Fetch(flight) => {
                    let outcome = self.bring(&flight.blocks, stop).map_err(Arc::new);
                    self.land(&flight, outcome.clone());
                    (flight, outcome)
                }
                Claim::Wait(flight) => {
                    let outcome = self.wait(&flight);
                    // It wanted more than this; perhaps less can be had. Or it gave up.
                    let more = blocks.end - blocks.start < flight.blocks.end - flight.blocks.start;
                    let again = |missing: &Arc<Missing>| {
                        let failed = more && missing.unkept.is_none();
                        (failed || missing.given_up) && !stop.is_given_up()
                    };
                    if outcome.as_ref().is_err_and(again) {
                        continue;
                    }
                    (flight, outcome)
                }
            };
            drop(flight);
            outcome.map_err(|missing| (*missing).clone())?;
        }
        Ok(())
    }

    /// Reads bytes of the file, after fetching what is missing.
    ///
    /// What comes and cannot be written is read all the same, as it came.
    pub(crate) fn read(&self, offset: u64, into: &mut [u8], stop: &Stop) -> Result<(), Fault> {
        let bytes = offset..offset.saturating_add(into.len() as u64);
        let blocks = self.blocks(&bytes);
        for _ in 0..TRIES {
            {
                let _gate = self.gate.read().unwrap_or_else(PoisonError::into_inner);
                if self.map.has_all(blocks.clone()) {
                    return self
                        .file
                        .read_exact_at(into, offset)
                        .map_err(|source| Fault::Read {
                            offset,
                            length: into.len() as u64,
                            source,
                        });
                }
            }
            match self.fetch(&bytes, stop) {
                Err(missing) if missing.unkept.is_some() => {
                    return self.read_unkept(&missing, &bytes, into, stop);
                }
                fetched => fetched?,
            }
        }
        Err(Missing::new(bytes, "others find them wrong again and again").into())
    }

    /// Bytes of which some came and could not be written: as they came, or, if that is
    /// not all of them, as they come once more.
    fn read_unkept(
        &self,
        missing: &Missing,
        bytes: &Range<u64>,
        into: &mut [u8],
        stop: &Stop,
    ) -> Result<(), Fault> {
        if let Some(came) = missing.unkept(bytes) {
            into.copy_from_slice(came);
            return Ok(());
        }
        self.ask(bytes, stop, &mut |given| {
            into.copy_from_slice(given);
            Ok(())
        })
        .map_err(Fault::from)
    }

    /// Gives back what is here of all chunks, which can be had again, for bytes that
    /// somebody waits for and that find no room. Not if somebody wants it all.
    pub(crate) fn shed(&self) {
        if self.completing.load(Ordering::Acquire) > 0 || self.whole.load(Ordering::Acquire) {
            return;
        }
        let _gate = self.gate.write().unwrap_or_else(PoisonError::into_inner);
        self.rejected.fetch_add(1, Ordering::Relaxed);
        let blocks = self.all_blocks();
        if self.map.clear(blocks.clone()).is_ok() {
            let _ = punch(&self.file, &self.bytes_of(&blocks));
        }
    }

    /// Waits until nobody fetches or replaces any of the blocks of these bytes, and keeps
    /// others from it: of many who read a wrong chunk one has it replaced.
    pub(crate) fn begin_replacing(&self, bytes: &Range<u64>) -> Replacing<'_> {
        let flight = Arc::new(Flight {
            blocks: self.blocks(bytes),
            outcome: OnceLock::new(),
        });
        let ours = || flight.blocks.clone();
        let flights = lock(&self.flights);
        let taken = |flights: &mut HashMap<u64, Arc<Flight>>| {
            ours().any(|block| flights.contains_key(&block))
        };
        let waited = self.landed.wait_while(flights, taken);
        let mut flights = waited.unwrap_or_else(PoisonError::into_inner);
        flights.extend(ours().map(|block| (block, flight.clone())));
        drop(flights);
        Replacing { file: self, flight }
    }

    /// Reads bytes of the file if all of them are here.
    pub(crate) fn read_here(&self, offset: u64, into: &mut [u8]) -> bool {
        let bytes = offset..offset.saturating_add(into.len() as u64);
        let _gate = self.gate.read().unwrap_or_else(PoisonError::into_inner);
        self.map.has_all(self.blocks(&bytes)) && self.file.read_exact_at(into, offset).is_ok()
    }

    /// Drops what is here of these bytes: they are not the image's.
    pub(crate) fn reject(&self, bytes: &Range<u64>) {
        let _gate = self.gate.write().unwrap_or_else(PoisonError::into_inner);
        self.rejected.fetch_add(1, Ordering::Relaxed);
        let blocks = self.blocks(bytes);
        // If the map's file cannot be written, the hash tells again later.
        let _ = self.map.clear(blocks.clone());
        let _ = punch(&self.file, &self.bytes_of(&blocks));
    }

    /// How often something was found wrong. Waits until nothing is being fetched: if
    /// all is here, what is found from then on stays unless this grows.
    pub(crate) fn rejections(&self) -> u64 {
        let flights = lock(&self.flights);
        let none = self
            .landed
            .wait_while(flights, |flights| !flights.is_empty());
        drop(none.unwrap_or_else(PoisonError::into_inner));
        self.rejected.load(Ordering::Relaxed)
    }

    /// Fetches bytes anew, from one origin after the other, until `right` says
    /// yes to them; only those are kept, and what is in the same blocks.
    pub(crate) fn replace(
        &self,
        bytes: &Range<u64>,
        stop: &Stop,
        right: &mut dyn FnMut(&[u8]) -> bool,
    ) -> Result<(), Missing> {
        let blocks = self.blocks(bytes);
        let around = self.bytes_of(&blocks);
        if bytes.start < around.start || bytes.end > around.end {
            let tried = "they came with the image's tables, and are not the image's";
            return Err(Missing::new(bytes.clone(), tried));
        }
        let wanted = (bytes.start - around.start) as usize..(bytes.end - around.start) as usize;
        self.ask(&around, stop, &mut |given| {
            if !right(&given[wanted.clone()]) {
                return Err(Refused::Wrong);
            }
            // Who asks has them by now; the next one asks again.
            let _ = self.keep(&blocks, &around, given);
            Ok(())
        })
    }

    /// All was found here and right: the file is an ordinary image now.
    pub(crate) fn finish(&self) -> io::Result<()> {
        self.file.sync_all()?;
        // Another image may have taken this one's name, with a map that it needs.
        if !self.whole.swap(true, Ordering::AcqRel) && self.map.has_its_name()? {
            std::fs::remove_file(self.map.path())?;
            jiffy_sys::durable::sync_folder_of(self.map.path())?;
        }
        Ok(())
    }

    /// Blocks that have chunks.
    pub(crate) fn all_blocks(&self) -> Range<u64> {
        self.blocks(&(0..self.map.header().tail))
    }

    /// The bytes of some blocks that are chunks'.
    pub(crate) fn bytes_of(&self, blocks: &Range<u64>) -> Range<u64> {
        self.clip(&self.map.bytes_of(blocks))
    }

    /// The blocks one needs for these bytes; none for header and manifest.
    fn blocks(&self, bytes: &Range<u64>) -> Range<u64> {
        let bytes = self.clip(bytes);
        if bytes.is_empty() {
            return 0..0;
        }
        self.map.units_of(&bytes)
    }

    /// Without header and manifest.
    fn clip(&self, bytes: &Range<u64>) -> Range<u64> {
        let start = bytes.start.max(header::BYTES as u64);
        start..bytes.end.min(self.map.header().tail).max(start)
    }

    /// What one thread is to do so that `blocks` are here.
    fn claim(&self, blocks: &Range<u64>) -> Claim {
        let most = (FETCH_MAX / u64::from(self.map.header().unit)).max(1);
        let mut flights = lock(&self.flights);
        let mut waited = None;
        let mut at = blocks.start;
        while let Some(run) = self.map.next_missing(at..blocks.end) {
            let flown = run.clone().find(|block| !flights.contains_key(block));
            waited = waited.or_else(|| flights.get(&run.start).cloned());
            if let Some(start) = flown {
                let end = (start..run.end.min(start + most))
                    .find(|block| flights.contains_key(block))
                    .unwrap_or(run.end.min(start + most));
                let flight = Arc::new(Flight {
                    blocks: start..end,
                    outcome: OnceLock::new(),
                });
                flights.extend((start..end).map(|block| (block, flight.clone())));
                return Claim::Fetch(flight);
            }
            at = run.end;
        }
        waited.map_or(Claim::Nothing, Claim::Wait)
    }

    fn land(&self, flight: &Flight, outcome: Result<(), Arc<Missing>>) {
        let mut flights = lock(&self.flights);
        for block in flight.blocks.clone() {
            flights.remove(&block);
        }
        let _ = flight.outcome.set(outcome);
        drop(flights);
        self.landed.notify_all();
    }

    fn wait(&self, flight: &Flight) -> Result<(), Arc<Missing>> {
        let flights = lock(&self.flights);
        let landed = self
            .landed
            .wait_while(flights, |_| flight.outcome.get().is_none());
        drop(landed.unwrap_or_else(PoisonError::into_inner));
        flight.outcome.get().cloned().unwrap_or(Ok(()))
    }

    /// Fetches a run of blocks from the first origin that gives it.
    fn bring(&self, blocks: &Range<u64>, stop: &Stop) -> Result<(), Missing> {
        let bytes = self.bytes_of(blocks);
        self.ask(&bytes, stop, &mut |given| {
            self.keep(blocks, &bytes, given).or_else(|_| {
                self.shed();
                let kept = self.keep(blocks, &bytes, given);
                kept.map_err(Refused::Unkept)
            })
        })
    }

    /// Asks one origin after the other for bytes, those that may answer yet
    /// several times, until `take` takes what one gives.
    fn ask(
        &self,
        bytes: &Range<u64>,
        stop: &Stop,
        take: &mut dyn FnMut(&[u8]) -> Result<(), Refused>,
    ) -> Result<(), Missing> {
        let length = bytes.end - bytes.start;
        let mut origins = self
            .origins
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        origins.sort_by_key(|known| known.failures.load(Ordering::Relaxed));
        let mut answers: Vec<OriginError> = origins
            .iter()
            .map(|_| OriginError::for_now("it was not asked"))
            .collect();
        for round in 0..ROUNDS {
            if !answers.iter().any(|answer| answer.again) {
                break;
            }
            if round > 0 {
                thread::sleep(PAUSE * (1 << (round - 1)));
            }
            let open = origins.iter().zip(&mut answers);
            for (known, answer) in open.filter(|(_, answer)| answer.again) {
                if stop.is_given_up() {
                    return Err(Missing {
                        given_up: true,
                        ..Missing::new(bytes.clone(), "nobody waits for it any more")
                    });
                }
                *answer = match known.origin.fetch(bytes.clone(), stop) {
                    Ok(given) if given.len() as u64 == length => {
                        self.fetched.fetch_add(length, Ordering::Relaxed);
                        match take(&given) {
                            Ok(()) => return Ok(()),
                            Err(Refused::Wrong) => OriginError::never(WRONG),
                            Err(Refused::Unkept(error)) => {
                                let from = known.origin.name();
                                let why =
                                    format!("{from}: what it gave cannot be kept here: {error}");
                                return Err(Missing {
                                    unkept: Some(Arc::new(given)),
                                    ..Missing::new(bytes.clone(), why)
                                });
                            }
                        }
                    }
                    Ok(given) => OriginError::for_now(format!(
                        "it gave {} bytes instead of {length}",
                        given.len()
                    )),
                    Err(error) => error,
                };
                // One that was only asked in vain because nobody waits has done no wrong.
                if !stop.is_given_up() {
                    known.failures.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        let told: Vec<String> = origins
            .iter()
            .zip(&answers)
            .map(|(known, answer)| format!("{}: {answer}", known.origin.name()))
            .collect();
        let tried = match &told[..] {
            [] => "it is not here, and nobody is known who has it".into(),
            told => told.join("; "),
        };
        Err(Missing {
            given_up: stop.is_given_up(),
            ..Missing::new(bytes.clone(), tried)
        })
    }

    /// Writes what came, then says that it is here.
    fn keep(&self, blocks: &Range<u64>, bytes: &Range<u64>, given: &[u8]) -> io::Result<()> {
        // None of these is dropped between the two steps.
        let _gate = self.gate.read().unwrap_or_else(PoisonError::into_inner);
        self.file
            .write_all_at(given, bytes.start)
            .and_then(|()| self.map.set(blocks.clone()))
    }
}

fn known(origins: Vec<Arc<dyn Origin>>) -> Vec<Arc<Known>> {
    let known = |origin| Known {
        origin,
        failures: AtomicU32::new(0),
    };
    origins.into_iter().map(known).map(Arc::new).collect()
}

impl Drop for PartialFile {
    fn drop(&mut self) {
        if !self.whole.load(Ordering::Acquire) {
            self.map.touch();
        }
    }
}

/// Gives a range back to the file system; it reads as zeros.
pub(super) fn punch(file: &File, bytes: &Range<u64>) -> io::Result<()> {
    if bytes.is_empty() {
        return Ok(());
    }
    let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    Ok(fallocate(file, how, bytes.start, bytes.end - bytes.start)?)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
