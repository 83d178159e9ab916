//! Fills chunks from the image into the cache.

use super::room::{OnFullDisk, Unwritten};
use super::{Disk, Unavailable};
use crate::image::{ChunkImage, Content};
use crate::scratch::{Scratch, first};
use jiffy_store::disk_cache::Claim;
use std::ops::Range;
use std::sync::atomic::Ordering;

/// Why chunks are not in the cache.
#[derive(Debug)]
pub(super) enum FillError {
    /// They cannot be read from the image.
    Unavailable(Unavailable),
    /// There is no disk space for them.
    Unwritten(Unwritten),
}

impl From<FillError> for Unavailable {
    fn from(error: FillError) -> Unavailable {
        match error {
            FillError::Unavailable(unavailable) => unavailable,
            FillError::Unwritten(unwritten) => unwritten.into(),
        }
    }
}

/// About how many bytes are put into the cache at once.
const RUN: usize = 256 << 10;

impl Disk {
    /// Makes these chunks present in the cache, no matter which thread writes them.
    pub(super) fn fill(
        &self,
        chunks: Range<u32>,
        on_full_disk: OnFullDisk,
        scratch: &mut Scratch,
    ) -> Result<(), FillError> {
        let mut fetched = chunks.start;
        while let Some(missing) = self.cache.next_missing(chunks.clone()) {
            self.check_ended()?;
            if missing.end > fetched && missing.end - missing.start > 1 {
                // One large read instead of many. If it fails, the read of the chunk concerned
                // reports the error.
                let chunks: Vec<u32> = missing.clone().collect();
                let reader = self.image.reader();
                let _ = reader.fetch_chunks(&mut scratch.decoder, &chunks);
                fetched = missing.end;
            }
            let most = (RUN / self.image.chunk_size()) as u32;
            match self.cache.claim(&missing, most) {
                Claim::Fill(flight) => {
                    // A disk has at most 2^32 - 1 chunks.
                    let run = flight.units().start as u32..flight.units().end as u32;
                    let outcome = self.fill_run(run.clone(), scratch);
                    // Other threads must not wait for these chunks while this one waits for disk
                    // space.
                    self.cache.end_flight(&flight);
                    match outcome {
                        Ok(()) => {}
                        Err(FillError::Unwritten(unwritten))
                            if on_full_disk == OnFullDisk::Wait =>
                        {
                            let kept = self.wait_for_room(unwritten, scratch);
                            kept.map_err(FillError::Unwritten)?;
                        }
                        Err(error) => return Err(error),
                    }
                }
                Claim::Wait(flight) => self.cache.wait(&flight),
                Claim::Nothing => {}
            }
        }
        Ok(())
    }

    /// Prefetches chunks; those that cannot be read are skipped. Returns the first problem.
    pub(super) fn fill_ahead(
        &self,
        chunks: &[u32],
        on_full_disk: OnFullDisk,
        scratch: &mut Scratch,
    ) -> Option<Unavailable> {
        let reader = self.image.reader();
        let missing: Vec<u32> = chunks
            .iter()
            .copied()
            .filter(|chunk| !self.cache.has(*chunk))
            .collect();
        if self.has_ended() || missing.is_empty() {
            return None;
        }
        let mut problem = None;
        scratch.decoder.stop = self.ended.clone();
        if let Err(error) = reader.fetch_chunks(&mut scratch.decoder, &missing)
            && self.ahead_log.admits()
        {
            tracing::warn!(disk = self.name, "{error}");
        }
        for run in missing.chunk_by(|one, next| one + 1 == *next) {
            let run = run[0]..run[run.len() - 1] + 1;
            let count = u64::from(run.end - run.start);
            match self.fill(run, on_full_disk, scratch) {
                Ok(()) => {
                    let ahead = &self.counters.ahead_chunks;
                    ahead.fetch_add(count, Ordering::Relaxed);
                }
                // Already logged.
                Err(FillError::Unwritten(unwritten)) => return Some(unwritten.into()),
                Err(FillError::Unavailable(error)) => {
                    if self.ahead_log.admits() {
                        tracing::warn!(disk = self.name, "{}", error.sentence);
                    }
                    problem.get_or_insert(error);
                }
            }
            if self.has_ended() {
                break;
            }
        }
        problem
    }

    fn check_ended(&self) -> Result<(), FillError> {
        match self.has_ended() {
            false => Ok(()),
            true => Err(FillError::Unavailable(Unavailable {
                chunk: None,
                sentence: format!("the disk {} is no longer served", self.name),
            })),
        }
    }

    /// Reads chunks and writes them to the cache; if one is bad, those before it are still written.
    fn fill_run(&self, run: Range<u32>, scratch: &mut Scratch) -> Result<(), FillError> {
        let size = self.image.chunk_size();
        let bytes = first(&mut scratch.chunks, run.len() * size);
        let mut outcome = Ok(());
        let mut good = 0;
        for (chunk, bytes) in run.clone().zip(bytes.chunks_mut(size)) {
            match self.image.read(&mut scratch.decoder, chunk, bytes) {
                Ok(Content::Zero) => bytes.fill(0),
                Ok(Content::Bytes { read }) => {
                    let total = &self.counters.bytes_read;
                    total.fetch_add(read, Ordering::Relaxed);
                }
                Err(error) => {
                    outcome = Err(FillError::Unavailable(Unavailable {
                        chunk: Some(chunk),
                        sentence: error.0,
                    }));
                    break;
                }
            }
            good += size;
        }
        if good > 0 {
            self.put(run.start, &bytes[..good]).map_err(|error| {
                let unwritten = Unwritten {
                    first: run.start,
                    length: good,
                    error,
                };
                match unwritten.error.is_disk_full() {
                    true => FillError::Unwritten(unwritten),
                    false => FillError::Unavailable(unwritten.into()),
                }
            })?;
            let total = &self.counters.bytes_filled;
            total.fetch_add(good as u64, Ordering::Relaxed);
        }
        outcome
    }
}
