//! Chunks from the image into the cache.

use super::room::{Unkept, WithoutRoom};
use super::{Disk, Unavailable, lock};
use crate::errands::Hands;
use crate::image::{ChunkImage, Content};
use crate::vm::first;
use std::ops::Range;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

/// Why chunks are not in the cache.
#[derive(Debug)]
pub(super) enum Unfilled {
    /// They cannot be had.
    Unavailable(Unavailable),
    /// They find no room.
    Unkept(Unkept),
}

impl From<Unfilled> for Unavailable {
    fn from(unfilled: Unfilled) -> Unavailable {
        match unfilled {
            Unfilled::Unavailable(unavailable) => unavailable,
            Unfilled::Unkept(unkept) => unkept.into(),
        }
    }
}

/// Bytes put into the cache at once, about.
const RUN: usize = 256 << 10;

impl Disk {
    /// Has these chunks in the cache, whoever puts them there.
    pub(super) fn fill(
        &self,
        chunks: Range<u32>,
        without_room: WithoutRoom,
        hands: &mut Hands,
    ) -> Result<(), Unfilled> {
        let mut at = chunks.start;
        let mut fetched = chunks.start;
        while let Some(missing) = self.cache.next_missing(at..chunks.end) {
            self.go_on()?;
            if missing.end > fetched && missing.end - missing.start > 1 {
                // One large read instead of many. Why it fails, if it does, is
                // told by the chunk it concerns.
                let chunks: Vec<u32> = missing.clone().collect();
                let stop = hands.decoder.stop.clone();
                let _ = self.image.reader().fetch_chunks(&chunks, &stop);
                fetched = missing.end;
            }
            match self.claim(&missing) {
                Some(run) => {
                    let outcome = self.fill_run(run.clone(), hands);
                    // Nobody else waits for these as long as this waits for room.
                    self.release(&run);
                    at = match outcome {
                        Ok(()) => run.end,
                        Err(Unfilled::Unkept(unkept)) if without_room == WithoutRoom::Wait => {
                            let kept = self.wait_for_room(unkept, hands);
                            kept.map_err(Unfilled::Unkept)?;
                            run.start
                        }
                        Err(unfilled) => return Err(unfilled),
                    };
                }
                None => {
                    self.wait_for(missing.start);
                    at = missing.start;
                }
            }
        }
        Ok(())
    }

    /// Puts chunks there that nobody waits for; what cannot be had is left out.
    /// The first problem.
    pub(super) fn fill_ahead(
        &self,
        chunks: &[u32],
        without_room: WithoutRoom,
        hands: &mut Hands,
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
        hands.decoder.stop = self.ended.clone();
        if let Err(error) = reader.fetch_chunks(&missing, &self.ended) {
            tracing::warn!(disk = self.name, "{error}");
        }
        for run in missing.chunk_by(|one, next| one + 1 == *next) {
            let run = run[0]..run[run.len() - 1] + 1;
            let count = u64::from(run.end - run.start);
            match self.fill(run, without_room, hands) {
                Ok(()) => {
                    let ahead = &self.counters.ahead_chunks;
                    ahead.fetch_add(count, Ordering::Relaxed);
                }
                // The log was told of it.
                Err(Unfilled::Unkept(unkept)) => return Some(unkept.into()),
                Err(Unfilled::Unavailable(error)) => {
                    tracing::warn!(disk = self.name, "{}", error.sentence);
                    problem.get_or_insert(error);
                }
            }
            if self.has_ended() {
                break;
            }
        }
        problem
    }

    fn go_on(&self) -> Result<(), Unfilled> {
        match self.has_ended() {
            false => Ok(()),
            true => Err(Unfilled::Unavailable(Unavailable {
                chunk: None,
                sentence: format!("the disk {} is served no longer", self.name),
            })),
        }
    }

    /// The first chunks of a missing run, to be filled by this thread alone;
    /// `None` if another fills the first.
    fn claim(&self, missing: &Range<u32>) -> Option<Range<u32>> {
        let most = (RUN / self.image.chunk_size()).max(1) as u32;
        let end = missing.end.min(missing.start + most);
        let mut filling = lock(&self.filling);
        let end = (missing.start..end)
            .find(|chunk| filling.contains(chunk) || self.cache.has(*chunk))
            .unwrap_or(end);
        let run = missing.start..end;
        filling.extend(run.clone());
        (!run.is_empty()).then_some(run)
    }

    fn release(&self, run: &Range<u32>) {
        let mut filling = lock(&self.filling);
        filling.retain(|chunk| !run.contains(chunk));
        drop(filling);
        self.filled.notify_all();
    }

    fn wait_for(&self, chunk: u32) {
        let filling = lock(&self.filling);
        let waited = self
            .filled
            .wait_while(filling, |filling| filling.contains(&chunk));
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Reads chunks and puts them there; those before a bad one too.
    fn fill_run(&self, run: Range<u32>, hands: &mut Hands) -> Result<(), Unfilled> {
        let size = self.image.chunk_size();
        let bytes = first(&mut hands.chunks, run.len() * size);
        let mut outcome = Ok(());
        let mut good = 0;
        for (chunk, bytes) in run.clone().zip(bytes.chunks_mut(size)) {
            match self.image.read(&mut hands.decoder, chunk, bytes) {
                Ok(Content::Zero) => bytes.fill(0),
                Ok(Content::Bytes { read }) => {
                    let total = &self.counters.bytes_read;
                    total.fetch_add(read, Ordering::Relaxed);
                }
                Err(error) => {
                    outcome = Err(Unfilled::Unavailable(Unavailable {
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
                let unkept = Unkept {
                    first: run.start,
                    length: good,
                    error,
                };
                match unkept.error.is_for_want_of_room() {
                    true => Unfilled::Unkept(unkept),
                    false => Unfilled::Unavailable(unkept.into()),
                }
            })?;
            let total = &self.counters.bytes_filled;
            total.fetch_add(good as u64, Ordering::Relaxed);
        }
        outcome
    }
}
