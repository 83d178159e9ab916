//! Threads that read, hash and compress. Their results are written in order. A thread may be only a
//! few pieces ahead, so memory is bounded.

use super::WriteOptions;
use super::plan::{Plan, Set};
use crate::codec::{Codec, Encoder, is_zero};
use crate::error::WriteError;
use crate::format::{ContentHash, Kind, content_hash};
use crate::source::ChunkSource;
use jiffy_sys::mutex::{lock, unpoisoned};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::thread;
use zstd::zstd_safe::CDict;

/// How many pieces of work a thread may be ahead.
const MAX_AHEAD: usize = 3;

/// The input of all threads.
pub(super) struct Job<'a, S: ?Sized> {
    pub(super) source: &'a S,
    pub(super) options: &'a WriteOptions,
    /// Chunks that are stored even if the parent or the backing file has them.
    pub(super) hot: Set,
    /// Chunks that are stored raw.
    pub(super) quick: Set,
    pub(super) dictionary: Option<&'a [u8]>,
}

/// A chunk that is not zero.
#[derive(Debug)]
pub(super) struct Item {
    pub(super) index: u32,
    pub(super) hash: ContentHash,
    pub(super) checksum: u32,
    pub(super) kind: Kind,
    /// Its bytes in the batch.
    pub(super) length: u32,
    pub(super) hot: bool,
    /// Its offset in the backing file; 0 if it is not there.
    pub(super) in_backing: u64,
}

/// The result for one piece of work.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub(super) items: Vec<Item>,
    /// The chunks to store, concatenated.
    pub(super) bytes: Vec<u8>,
}

/// The state that the threads share.
struct Queue<I> {
    plan: I,
    /// The number of the next piece to begin.
    next: usize,
    /// The number of the next piece to write.
    written: usize,
    done: BTreeMap<usize, Result<Batch, WriteError>>,
    /// Number of threads that have not ended.
    working: usize,
    /// Set when no further piece may begin.
    stop: bool,
}

struct Shared<I> {
    queue: Mutex<Queue<I>>,
    changed: Condvar,
}

impl<I> Shared<I> {
    fn lock(&self) -> MutexGuard<'_, Queue<I>> {
        lock(&self.queue)
    }

    fn wait<'a>(&self, queue: MutexGuard<'a, Queue<I>>) -> MutexGuard<'a, Queue<I>> {
        unpoisoned(self.changed.wait(queue))
    }
}

/// When dropped, reports the end of its thread, even after a panic.
struct EndOnDrop<'a, I>(&'a Shared<I>);

impl<I> Drop for EndOnDrop<'_, I> {
    fn drop(&mut self) {
        let mut queue = self.0.lock();
        queue.working -= 1;
        if thread::panicking() {
            queue.stop = true;
        }
        self.0.changed.notify_all();
    }
}

/// When dropped, stops the threads from beginning further pieces, even after a panic of the caller.
struct StopOnDrop<'a, I>(&'a Shared<I>);

impl<I> Drop for StopOnDrop<'_, I> {
    fn drop(&mut self) {
        self.0.lock().stop = true;
        self.0.changed.notify_all();
    }
}

/// Works through the plan and passes every batch, in order, to `write` on the caller's thread. Ends
/// at the first error.
pub(super) fn run<S: ChunkSource + Sync + ?Sized>(
    job: &Job<'_, S>,
    plan: Plan,
    threads: usize,
    mut write: impl FnMut(Batch) -> Result<(), WriteError>,
) -> Result<(), WriteError> {
    let level = match job.options.codec {
        Codec::Zstd(level) => level,
        _ => 0,
    };
    let dictionary = job.dictionary.map(|bytes| CDict::create(bytes, level));
    let shared = Shared {
        queue: Mutex::new(Queue {
            plan: plan.batches(),
            next: 0,
            written: 0,
            done: BTreeMap::new(),
            working: threads,
            stop: false,
        }),
        changed: Condvar::new(),
    };
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let _end = EndOnDrop(&shared);
                work(job, dictionary.as_ref(), &shared, threads * MAX_AHEAD);
            });
        }
        let _stop = StopOnDrop(&shared);
        collect(&shared, &mut write)
    })
}

fn collect<I>(
    shared: &Shared<I>,
    write: &mut impl FnMut(Batch) -> Result<(), WriteError>,
) -> Result<(), WriteError> {
    loop {
        let mut queue = shared.lock();
        let batch = loop {
            let number = queue.written;
            if let Some(batch) = queue.done.remove(&number) {
                queue.written += 1;
                shared.changed.notify_all();
                break batch?;
            }
            if queue.working == 0 {
                return Ok(());
            }
            queue = shared.wait(queue);
        };
        drop(queue);
        write(batch)?;
    }
}

fn work<S: ChunkSource + ?Sized>(
    job: &Job<'_, S>,
    dictionary: Option<&CDict<'_>>,
    shared: &Shared<impl Iterator<Item = Vec<Range<u32>>>>,
    ahead: usize,
) {
    let options = job.options;
    // Both factors are small: no overflow.
    let limit = options.chunk_size as usize * usize::from(options.raw_above_percent) / 100;
    let mut encoder = Encoder::new(options.codec, dictionary, limit);
    let mut buffer = Vec::new();
    loop {
        let mut queue = shared.lock();
        while !queue.stop && queue.next >= queue.written + ahead {
            queue = shared.wait(queue);
        }
        if queue.stop {
            return;
        }
        let Some(ranges) = queue.plan.next() else {
            return;
        };
        let number = queue.next;
        queue.next += 1;
        drop(queue);
        let first = ranges.first().map_or(0, |range| range.start);
        let batch = match &mut encoder {
            Ok(encoder) => pack(job, &ranges, encoder, &mut buffer),
            Err(what) => Err(WriteError::Compress { index: first, what }),
        };
        shared.lock().done.insert(number, batch);
        shared.changed.notify_all();
    }
}

fn pack<S: ChunkSource + ?Sized>(
    job: &Job<'_, S>,
    ranges: &[Range<u32>],
    encoder: &mut Encoder<'_>,
    buffer: &mut Vec<u8>,
) -> Result<Batch, WriteError> {
    let chunk_size = job.options.chunk_size as usize;
    let mut batch = Batch::default();
    for range in ranges {
        let offset = u64::from(range.start) * chunk_size as u64;
        buffer.resize(range.len() * chunk_size, 0);
        job.source
            .read_at(offset, buffer)
            .map_err(|source| WriteError::Source { offset, source })?;
        for (index, chunk) in range.clone().zip(buffer.chunks_exact(chunk_size)) {
            if is_zero(chunk) {
                continue;
            }
            let hash = content_hash(chunk);
            let hot = job.hot.contains(index);
            let start = batch.bytes.len();
            let place = match hot {
                true => None,
                false => find_existing(job.options, index, &hash, chunk)?,
            };
            let (kind, in_backing) = match place {
                Some(place) => place,
                None => {
                    let (kind, stored) = match job.quick.contains(index) {
                        true => (Kind::Raw, chunk),
                        false => encoder.encode(chunk),
                    };
                    batch.bytes.extend_from_slice(stored);
                    (kind, 0)
                }
            };
            batch.items.push(Item {
                index,
                hash,
                checksum: crc_fast::crc32_iscsi(chunk),
                kind,
                length: (batch.bytes.len() - start) as u32,
                hot,
                in_backing,
            });
        }
    }
    Ok(batch)
}

/// The parent or the offset in the backing file that holds the chunk already.
fn find_existing(
    options: &WriteOptions,
    index: u32,
    hash: &ContentHash,
    chunk: &[u8],
) -> Result<Option<(Kind, u64)>, WriteError> {
    if in_parent(options, index, hash)? {
        return Ok(Some((Kind::Parent, 0)));
    }
    let backing = options.backing.as_ref();
    let found = backing.and_then(|backing| backing.find(index, chunk));
    Ok(found.map(|offset| (Kind::Backing, offset)))
}

fn in_parent(options: &WriteOptions, index: u32, hash: &ContentHash) -> Result<bool, WriteError> {
    match &options.parent {
        Some(parent) if index < parent.chunks() => {
            Ok(parent.content_hash(index)?.as_ref() == Some(hash))
        }
        _ => Ok(false),
    }
}
