//! Handles a full file system while a cache is filled.
//!
//! A full disk must not cause an I/O error in a guest. So data that can be fetched again is
//! dropped: first the fetched chunks of the image, which the cache has unpacked, then unused caches
//! in the same folder. If that is not enough, the VMM gets the bytes themselves, and its next read
//! tries again to cache them. A VMM of an older release does not take bytes; its read waits for a
//! while, because the node or its user may free disk space.

use super::{DemandOutcome, Disk, Unavailable, lock};
use crate::image::{ChunkImage, Content};
use crate::scratch::{Scratch, first};
use jiffy_store::disk_cache::{CacheError, trim_others};
use jiffy_wire::disk::ANSWER_BYTES_MAX;
use std::thread;
use std::time::{Duration, Instant};

/// How long a read waits for disk space. Its VMM waits three times as long for the pager.
pub(super) const ROOM_TIMEOUT: Duration = Duration::from_secs(60);
/// How often it tries again.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// How often the lack of disk space is logged.
const LOG_INTERVAL: Duration = Duration::from_secs(600);

/// What to do when there is no disk space for chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OnFullDisk {
    /// Wait for room.
    Wait,
    /// Give up.
    GiveUp,
}

/// Chunks that were read but could not be written: they are at the start of [`Scratch::chunks`].
#[derive(Debug)]
pub(super) struct Unwritten {
    /// The first.
    pub first: u32,
    /// Bytes.
    pub length: usize,
    /// The cause.
    pub error: CacheError,
}

impl Disk {
    /// Puts chunks into the cache, and drops other data if the disk is full.
    pub(super) fn put(&self, first: u32, bytes: &[u8]) -> Result<(), CacheError> {
        let error = match self.cache.put(first, bytes) {
            Err(error) if error.is_disk_full() => error,
            done => return done,
        };
        self.image.reader().drop_fetched();
        if self.cache.put(first, bytes).is_ok() {
            return Ok(());
        }
        let freed = trim_others(self.cache.folder(), bytes.len() as u64);
        if freed > 0 && self.cache.put(first, bytes).is_ok() {
            return Ok(());
        }
        let mut last_logged = lock(&self.full_disk_logged);
        if last_logged.is_none_or(|last_logged| last_logged.elapsed() > LOG_INTERVAL) {
            *last_logged = Some(Instant::now());
            tracing::warn!(disk = self.name, %error, "there is no disk space: fetched chunks are not cached");
        }
        Err(error)
    }

    /// Waits until there is disk space for chunks.
    pub(super) fn wait_for_room(
        &self,
        unwritten: Unwritten,
        scratch: &Scratch,
    ) -> Result<(), Unwritten> {
        let begun = Instant::now();
        loop {
            if scratch.decoder.stop.is_cancelled()
                || self.has_ended()
                || begun.elapsed() > ROOM_TIMEOUT
            {
                return Err(unwritten);
            }
            thread::sleep(RETRY_INTERVAL);
            match self.put(unwritten.first, &scratch.chunks[..unwritten.length]) {
                Ok(()) => return Ok(()),
                Err(error) if error.is_disk_full() => {}
                Err(error) => return Err(Unwritten { error, ..unwritten }),
            }
        }
    }

    /// Returns the first bytes of a range when there is no disk space for some of its chunks.
    pub(super) fn read_without_cache(
        &self,
        offset: u64,
        length: u64,
        unwritten: &Unwritten,
        scratch: &mut Scratch,
    ) -> Result<DemandOutcome, Unavailable> {
        let size = self.image.chunk_size();
        let end = offset + length.min(ANSWER_BYTES_MAX as u64);
        let read = std::mem::take(&mut scratch.chunks);
        let mut bytes = Vec::with_capacity((end - offset) as usize);
        for chunk in self.cache.chunks_of(&(offset..end)) {
            let start = u64::from(chunk) * size as u64;
            let part =
                offset.saturating_sub(start) as usize..(end - start).min(size as u64) as usize;
            let at = chunk
                .checked_sub(unwritten.first)
                .map(|nth| nth as usize * size);
            match at.and_then(|at| read[..unwritten.length].get(at..at + size)) {
                Some(chunk) => bytes.extend_from_slice(&chunk[part]),
                None => bytes.extend_from_slice(&self.read_chunk(chunk, scratch)?[part]),
            }
        }
        scratch.chunks = read;
        Ok(DemandOutcome::Bytes(bytes))
    }

    /// Reads a chunk from the cache or the image.
    fn read_chunk<'a>(
        &self,
        chunk: u32,
        scratch: &'a mut Scratch,
    ) -> Result<&'a [u8], Unavailable> {
        let bytes = first(&mut scratch.chunks, self.image.chunk_size());
        if self.cache.read(chunk, bytes).is_ok_and(|is_there| is_there) {
            return Ok(bytes);
        }
        match self.image.read(&mut scratch.decoder, chunk, bytes) {
            Ok(Content::Zero) => bytes.fill(0),
            Ok(Content::Bytes { .. }) => {}
            Err(error) => {
                return Err(Unavailable {
                    chunk: Some(chunk),
                    sentence: error.0,
                });
            }
        }
        Ok(bytes)
    }
}

impl From<Unwritten> for Unavailable {
    fn from(unwritten: Unwritten) -> Unavailable {
        Unavailable {
            chunk: Some(unwritten.first),
            sentence: crate::image::Unreadable::from_error(&unwritten.error).0,
        }
    }
}
