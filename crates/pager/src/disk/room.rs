//! Handles a full file system while a cache is filled.
//!
//! If a read failed because the disk is full, the guest would see an I/O error without fault of its
//! own. So data that can be fetched again is dropped: first the fetched chunks of the image, which
//! the cache has unpacked, then unused caches in the same folder. If that is not enough, the VMM
//! gets the bytes themselves, and its next read tries again to keep them. A VMM of an older release
//! does not take bytes; its read waits for a while, because the node or its user may free disk
//! space.

use super::{Disk, Had, Unavailable, lock};
use crate::image::{ChunkImage, Content};
use crate::scratch::{Scratch, first};
use jiffy_store::disk_cache::{CacheError, trim_others};
use jiffy_wire::disk::ANSWER_BYTES_MAX;
use std::thread;
use std::time::{Duration, Instant};

/// How long a read waits for disk space. Its VMM waits three times as long for the pager.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
/// How often it tries again.
const GLANCE: Duration = Duration::from_millis(100);
/// How often the lack of disk space is logged.
const TOLD_EVERY: Duration = Duration::from_secs(600);

/// What to do when there is no disk space for chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WithoutRoom {
    /// Wait for room.
    Wait,
    /// Give up.
    GiveUp,
}

/// Chunks that were read but could not be written: they are at the start of [`Scratch::chunks`].
#[derive(Debug)]
pub(super) struct Unkept {
    /// The first.
    pub first: u32,
    /// Bytes.
    pub length: usize,
    /// Why not.
    pub error: CacheError,
}

impl Disk {
    /// Puts chunks into the cache, and drops other data if the disk is full.
    pub(super) fn put(&self, first: u32, bytes: &[u8]) -> Result<(), CacheError> {
        let error = match self.cache.put(first, bytes) {
            Err(error) if error.is_for_want_of_room() => error,
            done => return done,
        };
        self.image.reader().shed();
        if self.cache.put(first, bytes).is_ok() {
            return Ok(());
        }
        let freed = trim_others(self.cache.folder(), bytes.len() as u64);
        if freed > 0 && self.cache.put(first, bytes).is_ok() {
            return Ok(());
        }
        let mut told = lock(&self.told_of_room);
        if told.is_none_or(|told| told.elapsed() > TOLD_EVERY) {
            *told = Some(Instant::now());
            tracing::warn!(disk = self.name, %error, "what is read finds no room and is not kept");
        }
        Err(error)
    }

    /// Waits until there is disk space for chunks.
    pub(super) fn wait_for_room(&self, unkept: Unkept, scratch: &Scratch) -> Result<(), Unkept> {
        let begun = Instant::now();
        loop {
            if scratch.decoder.stop.is_given_up() || self.has_ended() || begun.elapsed() > PATIENCE
            {
                return Err(unkept);
            }
            thread::sleep(GLANCE);
            match self.put(unkept.first, &scratch.chunks[..unkept.length]) {
                Ok(()) => return Ok(()),
                Err(error) if error.is_for_want_of_room() => {}
                Err(error) => return Err(Unkept { error, ..unkept }),
            }
        }
    }

    /// Returns the first bytes of a range when there is no disk space for some of its chunks.
    pub(super) fn without_room(
        &self,
        offset: u64,
        length: u64,
        unkept: &Unkept,
        scratch: &mut Scratch,
    ) -> Result<Had, Unavailable> {
        let size = self.image.chunk_size();
        let end = offset + length.min(ANSWER_BYTES_MAX as u64);
        let read = std::mem::take(&mut scratch.chunks);
        let mut bytes = Vec::with_capacity((end - offset) as usize);
        for chunk in self.cache.chunks_of(&(offset..end)) {
            let start = u64::from(chunk) * size as u64;
            let part =
                offset.saturating_sub(start) as usize..(end - start).min(size as u64) as usize;
            let at = chunk
                .checked_sub(unkept.first)
                .map(|nth| nth as usize * size);
            match at.and_then(|at| read[..unkept.length].get(at..at + size)) {
                Some(chunk) => bytes.extend_from_slice(&chunk[part]),
                None => bytes.extend_from_slice(&self.read_chunk(chunk, scratch)?[part]),
            }
        }
        scratch.chunks = read;
        Ok(Had::Bytes(bytes))
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

impl From<Unkept> for Unavailable {
    fn from(unkept: Unkept) -> Unavailable {
        Unavailable {
            chunk: Some(unkept.first),
            sentence: crate::image::Unreadable::from_error(&unkept.error).0,
        }
    }
}
