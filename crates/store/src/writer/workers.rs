//! Threads that read, hash and compress. Their results are written in order. A thread may be only a
//! few pieces ahead, so memory is bounded.

use super::WriteOptions;
use super::plan::{Plan, Set};
use crate::codec::{Codec, Encoder, checksum, is_zero};
use crate::error::WriteError;
use crate::format::{ContentHash, Kind, content_hash};
use crate::source::ChunkSource;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use zstd::zstd_safe::CDict;

/// How many pieces of work a thread may be ahead.
const AHEAD: usize = 3;

/// What all threads need for their work.
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

/// What the threads share.
struct Desk<I> {
    plan: I,
    /// The number of the next piece to begin.
    next: usize,
    /// The number of the next piece to write.
    written: usize,
    done: BTreeMap<usize, Result<Batch, WriteError>>,
    /// How many threads have not ended.
    working: usize,
    /// Set when no further piece may begin.
    stop: bool,
}

struct Room<I> {
    desk: Mutex<Desk<I>>,
    changed: Condvar,
}

impl<I> Room<I> {
    fn lock(&self) -> MutexGuard<'_, Desk<I>> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, desk: MutexGuard<'a, Desk<I>>) -> MutexGuard<'a, Desk<I>> {
        self.changed
            .wait(desk)
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// When dropped, reports the end of its thread, even after a panic.
struct Leaving<'a, I>(&'a Room<I>);

impl<I> Drop for Leaving<'_, I> {
    fn drop(&mut self) {
        let mut desk = self.0.lock();
        desk.working -= 1;
        if thread::panicking() {
            desk.stop = true;
        }
        self.0.changed.notify_all();
    }
}

/// When dropped, stops the threads from beginning further pieces, even after a panic of the caller.
struct Stopping<'a, I>(&'a Room<I>);

impl<I> Drop for Stopping<'_, I> {
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
    let room = Room {
        desk: Mutex::new(Desk {
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
                let _leaving = Leaving(&room);
                work(job, dictionary.as_ref(), &room, threads * AHEAD);
            });
        }
        let _stopping = Stopping(&room);
        collect(&room, &mut write)
    })
}

fn collect<I>(
    room: &Room<I>,
    write: &mut impl FnMut(Batch) -> Result<(), WriteError>,
) -> Result<(), WriteError> {
    loop {
        let mut desk = room.lock();
        let batch = loop {
            let number = desk.written;
            if let Some(batch) = desk.done.remove(&number) {
                desk.written += 1;
                room.changed.notify_all();
                break batch?;
            }
            if desk.working == 0 {
                return Ok(());
            }
            desk = room.wait(desk);
        };
        drop(desk);
        write(batch)?;
    }
}

fn work<S: ChunkSource + ?Sized>(
    job: &Job<'_, S>,
    dictionary: Option<&CDict<'_>>,
    room: &Room<impl Iterator<Item = Vec<Range<u32>>>>,
    ahead: usize,
) {
    let options = job.options;
    // Both factors are small: no overflow.
    let limit = options.chunk_size as usize * usize::from(options.raw_above_percent) / 100;
    let mut encoder = Encoder::new(options.codec, dictionary, limit);
    let mut buffer = Vec::new();
    loop {
        let mut desk = room.lock();
        while !desk.stop && desk.next >= desk.written + ahead {
            desk = room.wait(desk);
        }
        if desk.stop {
            return;
        }
        let Some(ranges) = desk.plan.next() else {
            return;
        };
        let number = desk.next;
        desk.next += 1;
        drop(desk);
        let first = ranges.first().map_or(0, |range| range.start);
        let batch = match &mut encoder {
            Ok(encoder) => pack(job, &ranges, encoder, &mut buffer),
            Err(what) => Err(WriteError::Compress { index: first, what }),
        };
        room.lock().done.insert(number, batch);
        room.changed.notify_all();
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
                false => elsewhere(job.options, index, &hash, chunk)?,
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
                checksum: checksum(chunk),
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
fn elsewhere(
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
