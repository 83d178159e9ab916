//! Jobs that fill memory before it is touched.

use super::lock;
use crate::image::Unreadable;
use crate::scratch::{Scratch, first};
use crate::vm::{Stop, Vm};
use crate::window::{GAP, Window, windows};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Most bytes that are filled at once.
const RUN: usize = 64 << 10;

/// Called once when a job ends: with `None` if everything was filled, otherwise with the first
/// problem.
pub type Done = Box<dyn FnOnce(Option<String>) + Send>;

/// Work for a VM that is done in pieces while no fault waits.
pub struct Job {
    vm: Arc<Vm>,
    kind: Kind,
    pieces: usize,
    next: AtomicUsize,
    returned: Mutex<Vec<usize>>,
    left: AtomicUsize,
    problem: Mutex<Option<String>>,
    done: Mutex<Option<Done>>,
}

enum Kind {
    /// Fill everything that is missing; so many units per piece.
    Complete(u64),
    /// Fill the working set in the order in which it is stored.
    Prefetch(Vec<Part>),
}

/// A piece of a working set.
enum Part {
    /// Chunks that are contiguous in the file.
    Stored(Window),
    /// Units that are not stored in the file (zero, or in a parent).
    Unstored(Vec<u64>),
}

impl Job {
    /// Fills everything that is missing.
    pub fn complete(vm: Arc<Vm>, done: Done) -> Job {
        let units = (RUN as u64 / vm.unit()).max(1);
        let pieces = vm.units().div_ceil(units) as usize;
        Job::new(vm, Kind::Complete(units), pieces, done)
    }

    /// Fills these chunks, which need no origin; `None` if there are none. `then` is called when all
    /// of them are filled. Chunks that can't be read are left to faults, which report why.
    pub fn prefetch(vm: Arc<Vm>, chunks: Vec<u32>, then: Box<dyn FnOnce() + Send>) -> Option<Job> {
        let parts = parts(&vm, chunks);
        if parts.is_empty() {
            return None;
        }
        let pieces = parts.len();
        let of = vm.clone();
        let done = Box::new(move |problem: Option<String>| match problem {
            None => {
                tracing::debug!(vm = of.name(), "the working set is in memory");
                then();
            }
            // The VM has ended, and needs no more memory.
            Some(_) if of.has_ended() && of.failure().is_none() => {}
            Some(problem) if of.log().admits() => {
                tracing::warn!(
                    vm = of.name(),
                    "the working set could not be filled: {problem}"
                );
            }
            Some(_) => {}
        });
        Some(Job::new(vm, Kind::Prefetch(parts), pieces, done))
    }

    fn new(vm: Arc<Vm>, kind: Kind, pieces: usize, done: Done) -> Job {
        vm.begin_job();
        Job {
            vm,
            kind,
            pieces,
            next: AtomicUsize::new(0),
            returned: Mutex::default(),
            left: AtomicUsize::new(pieces),
            problem: Mutex::default(),
            done: Mutex::new(Some(done)),
        }
    }

    pub(super) fn vm(&self) -> &Arc<Vm> {
        &self.vm
    }

    /// The next piece to do; `None` when there is none, and always after the VM has ended.
    pub(super) fn claim(&self) -> Option<usize> {
        if self.vm.has_ended() {
            let why = self.vm.failure().unwrap_or("the VM has ended");
            self.report(Some(why.to_owned()));
            return None;
        }
        if let Some(piece) = lock(&self.returned).pop() {
            return Some(piece);
        }
        // The counter passes the end by at most one claim for each worker.
        let piece = self.next.fetch_add(1, Ordering::Relaxed);
        (piece < self.pieces).then_some(piece)
    }

    /// Returns a piece that must be claimed again.
    pub(super) fn put_back(&self, piece: usize) {
        lock(&self.returned).push(piece);
    }

    /// Notes that a piece is done, or was abandoned because of a problem.
    pub(super) fn finished(&self, problem: Option<String>) {
        if problem.is_some() {
            let mut first = lock(&self.problem);
            if first.is_none() {
                *first = problem;
            }
        }
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            let problem = lock(&self.problem).take();
            self.report(problem);
        }
    }

    fn report(&self, outcome: Option<String>) {
        let done = lock(&self.done).take();
        if let Some(done) = done {
            self.vm.end_job();
            done(outcome);
        }
    }

    /// Does one piece; calls `between` at points where more urgent work may go first. Returns why a
    /// part of it was left to faults, if so.
    pub(super) fn work(
        &self,
        piece: usize,
        scratch: &mut Scratch,
        between: &mut dyn FnMut(&mut Scratch),
    ) -> Result<Option<String>, Stop> {
        match &self.kind {
            Kind::Complete(units) => {
                let first = piece as u64 * units;
                for unit in first..(first + units).min(self.vm.units()) {
                    if !self.vm.is_filled(unit) {
                        self.vm.fill_unit(unit, None, scratch)?;
                    }
                }
                Ok(None)
            }
            Kind::Prefetch(parts) => {
                if piece == 0 {
                    start_readahead(&self.vm, parts);
                }
                match &parts[piece] {
                    Part::Stored(window) => fill_window(&self.vm, window, scratch, between),
                    Part::Unstored(units) => fill_unstored(&self.vm, units, scratch, between),
                }
            }
        }
    }
}

/// Divides the working set into parts that are each read at once.
fn parts(vm: &Vm, working_set: Vec<u32>) -> Vec<Part> {
    let image = vm.image();
    let one_chunk_a_unit = vm.unit() == image.chunk_size() as u64;
    let mut stored = Vec::new();
    let mut unstored = Vec::new();
    for chunk in working_set {
        let unit = u64::from(chunk) * image.chunk_size() as u64 / vm.unit();
        if unit >= vm.units() {
            continue;
        }
        match image.stored(chunk) {
            Some(place) if one_chunk_a_unit => stored.push((chunk, place)),
            _ if unstored.last() == Some(&unit) => {}
            _ => unstored.push(unit),
        }
    }
    let per_piece = (RUN as u64 / vm.unit()).max(1) as usize;
    let unstored = unstored.chunks(per_piece);
    windows(stored)
        .into_iter()
        .map(Part::Stored)
        .chain(unstored.map(|units| Part::Unstored(units.to_vec())))
        .collect()
}

/// Starts the kernel's readahead of all windows, in order.
fn start_readahead(vm: &Vm, parts: &[Part]) {
    let mut whole: Option<Range<u64>> = None;
    for part in parts {
        if let Part::Stored(Window { file, .. }) = part {
            match &mut whole {
                Some(range) if file.start <= range.end + GAP => {
                    range.end = range.end.max(file.end);
                }
                Some(range) => {
                    vm.image().will_need(range.clone());
                    *range = file.clone();
                }
                None => whole = Some(file.clone()),
            }
        }
    }
    if let Some(range) = whole {
        vm.image().will_need(range);
    }
}

fn fill_window(
    vm: &Vm,
    window: &Window,
    scratch: &mut Scratch,
    between: &mut dyn FnMut(&mut Scratch),
) -> Result<Option<String>, Stop> {
    let size = vm.image().chunk_size();
    let missing: Vec<&(u32, Range<u64>)> = window
        .chunks
        .iter()
        .filter(|(chunk, _)| !vm.is_filled(u64::from(*chunk)))
        .collect();
    if missing.is_empty() {
        return Ok(None);
    }
    let mut stored = std::mem::take(&mut scratch.stored);
    let length = window.file.end - window.file.start;
    let bytes = first(&mut stored, length as usize);
    if let Err(error) = vm.image().read_stored(window.file.start, bytes) {
        return Ok(Some(error.0));
    }
    vm.counters().read(length);
    let most = (RUN / size).max(1);
    let consecutive = missing.chunk_by(|one, next| one.0 + 1 == next.0);
    let (mut since, mut problem) = (0, None);
    for run in consecutive.flat_map(|run| run.chunks(most)) {
        if run.iter().all(|(chunk, _)| vm.is_filled(u64::from(*chunk))) {
            // A fault has filled it meanwhile.
            continue;
        }
        since += run.len();
        if since > most {
            between(scratch);
            since = run.len();
        }
        let found = fill_consecutive(vm, window, &stored, run, scratch)?;
        problem = problem.or(found);
    }
    between(scratch);
    scratch.stored = stored;
    Ok(problem)
}

/// Fills chunks that are consecutive in memory, in one call; only those before the first that is bad.
fn fill_consecutive(
    vm: &Vm,
    window: &Window,
    stored: &[u8],
    run: &[&(u32, Range<u64>)],
    scratch: &mut Scratch,
) -> Result<Option<String>, Stop> {
    let size = vm.image().chunk_size();
    let begin = run[0].0;
    let (bytes, (valid, problem)) = match stored_raw(window, stored, run, size) {
        // Filled from the read buffer, without a copy.
        Some(bytes) => {
            let chunks = run.iter().zip(bytes.chunks(size));
            let right = chunks.map(|((chunk, _), bytes)| vm.image().check(*chunk, bytes));
            (bytes, count_valid(right))
        }
        None => {
            let bytes = first(&mut scratch.chunks, run.len() * size);
            let chunks = run.iter().zip(bytes.chunks_mut(size));
            let decoder = &mut scratch.decoder;
            let right = chunks.map(|((chunk, place), into)| {
                let from = &stored[window.within(place)];
                vm.image().decode(decoder, *chunk, from, into)
            });
            let valid = count_valid(right);
            (&*bytes, valid)
        }
    };
    vm.fill_bytes(u64::from(begin) * size as u64, &bytes[..valid * size])?;
    for chunk in begin..begin + valid as u32 {
        vm.mark_filled(u64::from(chunk));
    }
    vm.counters().prefetched(valid as u64);
    Ok(problem)
}

/// The bytes of a run of chunks that are stored uncompressed and consecutive.
fn stored_raw<'a>(
    window: &Window,
    stored: &'a [u8],
    run: &[&(u32, Range<u64>)],
    size: usize,
) -> Option<&'a [u8]> {
    let begin = run[0].1.start;
    let mut at = begin;
    for (_, place) in run {
        // A compressed chunk is shorter.
        if place.start != at || place.end - at != size as u64 {
            return None;
        }
        at = place.end;
    }
    Some(&stored[window.within(&(begin..at))])
}

/// The number of chunks before the first bad one, and what is wrong with that.
fn count_valid(outcomes: impl Iterator<Item = Result<(), Unreadable>>) -> (usize, Option<String>) {
    let mut valid = 0;
    for outcome in outcomes {
        if let Err(error) = outcome {
            return (valid, Some(error.0));
        }
        valid += 1;
    }
    (valid, None)
}

fn fill_unstored(
    vm: &Vm,
    units: &[u64],
    scratch: &mut Scratch,
    between: &mut dyn FnMut(&mut Scratch),
) -> Result<Option<String>, Stop> {
    let mut problem = None;
    for unit in units {
        if vm.is_filled(*unit) {
            continue;
        }
        match vm.fill_unit(*unit, None, scratch) {
            Ok(_) => vm.counters().prefetched(vm.chunks_of_unit()),
            Err(Stop::Failed(sentence)) => problem = problem.or(Some(sentence)),
            Err(stop) => return Err(stop),
        }
        between(scratch);
    }
    Ok(problem)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handshake::Layout;
    use crate::image::{ChunkImage, Content};
    use crate::vm::{Removed, VmParts};
    use jiffy_store::{Decoder, ImageId};
    use jiffy_sys::userfaultfd::{Arena, Features, Userfaultfd};
    use jiffy_wire::pager::Mapping;
    use std::sync::atomic::AtomicBool;

    const CHUNK: usize = 8 << 10;
    const CHUNKS: u32 = 8;

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Bad {
        Nothing,
        /// Chunk 1, which its parent has.
        Unstored,
        /// No chunk of the file can be read.
        File,
        /// Chunk 4, which the file has, has other bytes.
        Bytes,
    }

    /// The file has the chunks from 3 on, uncompressed.
    struct Image(Bad);

    fn unreadable(bad: bool) -> Result<(), Unreadable> {
        match bad {
            true => Err(Unreadable("it is bad".into())),
            false => Ok(()),
        }
    }

    impl ChunkImage for Image {
        fn id(&self) -> ImageId {
            ImageId([0; 16])
        }

        fn size(&self) -> u64 {
            u64::from(CHUNKS) * CHUNK as u64
        }

        fn chunk_size(&self) -> usize {
            CHUNK
        }

        fn read(
            &self,
            _: &mut Decoder,
            chunk: u32,
            bytes: &mut [u8],
        ) -> Result<Content, Unreadable> {
            unreadable(self.0 == Bad::Unstored && chunk == 1)?;
            bytes.fill(1);
            Ok(Content::Bytes { read: CHUNK as u64 })
        }

        fn stored(&self, chunk: u32) -> Option<Range<u64>> {
            let start = u64::from(chunk.checked_sub(3)?) * CHUNK as u64;
            Some(start..start + CHUNK as u64)
        }

        fn read_stored(&self, _: u64, into: &mut [u8]) -> Result<(), Unreadable> {
            into.fill(1);
            unreadable(self.0 == Bad::File)
        }

        fn check(&self, chunk: u32, _: &[u8]) -> Result<(), Unreadable> {
            unreadable(self.0 == Bad::Bytes && chunk == 4)
        }
    }

    fn vm(image: Image, arena: &Arena) -> Arc<Vm> {
        let uffd = Userfaultfd::create(Features::GUEST_MEMORY).unwrap();
        arena.register(&uffd).unwrap();
        let mapping = Mapping {
            base_host_virt_addr: arena.address(),
            size: image.size(),
            offset: 0,
            page_size: 4096,
            page_size_kib: 4096,
        };
        let layout = Layout::new(&[mapping], image.size()).unwrap();
        let parts = VmParts {
            name: "vm".into(),
            token: 1,
            uffd,
            removed: Removed::new(&layout),
            layout,
            image: Arc::new(image),
            counters: Arc::default(),
            touched: None,
            log: Arc::default(),
            on_failure: Box::new(|_| {}),
        };
        Arc::new(Vm::new(parts).unwrap())
    }

    #[test]
    fn what_follows_a_prefetch_is_done_only_if_every_chunk_was_filled() {
        for (bad, filled) in [
            (Bad::Nothing, &[0, 1, 2, 3, 4, 5, 6, 7][..]),
            (Bad::Unstored, &[0, 2, 3, 4, 5, 6, 7]),
            (Bad::File, &[0, 1, 2]),
            (Bad::Bytes, &[0, 1, 2, 3]),
        ] {
            let arena = Arena::anonymous(CHUNKS as usize * CHUNK).unwrap();
            let vm = vm(Image(bad), &arena);
            let called = Arc::new(AtomicBool::new(false));
            let then = Arc::clone(&called);
            let then = Box::new(move || then.store(true, Ordering::Relaxed));
            let job = Job::prefetch(vm.clone(), (0..CHUNKS).collect(), then).unwrap();
            while let Some(piece) = job.claim() {
                let problem = job.work(piece, &mut Scratch::default(), &mut |_| {});
                job.finished(problem.unwrap());
            }
            assert_eq!(
                called.load(Ordering::Relaxed),
                bad == Bad::Nothing,
                "{bad:?}"
            );
            let is_filled = |chunk: &u32| vm.is_filled(u64::from(*chunk));
            let found: Vec<u32> = (0..CHUNKS).filter(is_filled).collect();
            assert_eq!(found, filled, "{bad:?}");
            assert!(!vm.has_ended(), "{bad:?}");
        }
    }
}
