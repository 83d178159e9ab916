//! Chunks of a partial image: fetched, checked against their content hash, and fetched again if
//! they are wrong.

use super::{ImageReader, Opening};
use crate::codec::Decoder;
use crate::error::{Fault, ImageError};
use crate::format::{Entry, Footer, Kind, content_hash};
use crate::outline::manifest_id;
use crate::partial::blocks::{FETCH_MAX, Fetched, MAX_TRIES, Missing, PartialFile};
use crate::partial::{Origin, map_path};
use crate::presence::{PresenceFault, PresenceMap};
use crate::runs;
use crate::stop::Stop;
use std::fs::OpenOptions;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

/// Threads that fetch the missing parts of a whole image. They mostly wait for the network.
const FETCHERS: usize = 4;
/// Largest gap between two parts, bytes, that is fetched too, so that one read serves both.
const GAP: u64 = 64 << 10;

/// Opens the map of an image, if there is one; an image with a map is partial.
pub(super) fn open_map(path: &Path) -> Result<Option<PresenceMap>, Fault> {
    match PresenceMap::open(&map_path(path)) {
        Ok(map) => Ok(Some(map)),
        Err(error) => match &error.fault {
            PresenceFault::Io(source) if source.kind() == io::ErrorKind::NotFound => Ok(None),
            PresenceFault::Io(source) => Err(Fault::Map {
                why: source.to_string(),
                path: error.path,
            }),
            fault => Err(Fault::Map {
                why: fault.to_string(),
                path: error.path,
            }),
        },
    }
}

pub(super) fn open_partial(
    map: PresenceMap,
    path: &Path,
    length: u64,
    footer: &Footer,
    opening: &Opening<'_>,
) -> Result<PartialFile, Fault> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .map_err(Fault::Open)?;
    if manifest_id(&file, footer)? != footer.id {
        return Err(Fault::Damaged {
            offset: footer.groups.offset,
            what: "the image's id is not that of its manifest",
        });
    }
    PartialFile::new(
        file,
        length,
        footer,
        map,
        (opening.origins)(path, footer.id),
    )
}

impl ImageReader {
    /// Whether parts of it may be missing.
    pub fn is_partial(&self) -> bool {
        self.partial.is_some()
    }

    /// Replaces the origins of this image; those of its parents stay.
    pub fn set_origins(&self, origins: Vec<Arc<dyn Origin>>) {
        if let Some(partial) = &self.partial {
            partial.set_origins(origins);
        }
    }

    /// The registries that a read may have to wait for, those of parents and other packings
    /// included: their names, separated by spaces. Empty if all is on this computer.
    pub fn waits_for(&self) -> String {
        let mut names = Vec::new();
        let mut generation = Some(self);
        while let Some(reader) = generation {
            let others = reader.packings();
            let partial = others.iter().filter_map(|other| other.partial.as_ref());
            for partial in partial.chain(&reader.partial) {
                names.extend(partial.waits_for());
            }
            generation = reader.parent.as_ref().map(|(_, parent)| &**parent);
        }
        names.retain(|name| !name.is_empty());
        names.sort();
        names.dedup();
        names.join(" ")
    }

    /// Drops the fetched chunks of this image and its parents that can be fetched again. Called
    /// when there is no disk space for bytes that a reader waits for.
    pub fn drop_fetched(&self) {
        let mut generation = Some(self);
        while let Some(reader) = generation {
            let others = reader.packings();
            let partial = others.iter().filter_map(|other| other.partial.as_ref());
            partial
                .chain(&reader.partial)
                .for_each(|it| it.drop_fetched());
            generation = reader.parent.as_ref().map(|(_, parent)| &**parent);
        }
    }

    /// Bytes that were fetched from origins since it was opened, including those of its parents.
    pub fn fetched_bytes(&self) -> u64 {
        let others = self.packings();
        let partial = others.iter().filter_map(|other| other.partial.as_ref());
        let own: u64 = partial.chain(&self.partial).map(|it| it.fetched()).sum();
        let parents = self.parent.as_ref();
        own + parents.map_or(0, |(_, parent)| parent.fetched_bytes())
    }

    /// Bytes of the file that are not here; 0 for a whole image.
    pub fn missing_bytes(&self) -> u64 {
        self.partial.as_ref().map_or(0, |partial| partial.missing())
    }

    /// Whether a chunk can be read without asking an origin.
    ///
    /// # Errors
    ///
    /// If the chunk's place, here or in a parent, can't be read or is damaged.
    pub fn is_local(&self, index: u32) -> Result<bool, ImageError> {
        if self.partial.is_none() && self.parent.is_none() {
            return Ok(true);
        }
        Ok((match self.place(index)? {
            super::Place::Zero => true,
            super::Place::Entry(entry) if entry.kind == Kind::Parent => {
                self.parent_reader(index)?.is_local(index)?
            }
            super::Place::Entry(entry) => self
                .partial
                .as_ref()
                .is_none_or(|partial| partial.has(&entry.range())),
        }) || self
            .packings()
            .iter()
            .any(|other| other.is_local(index).unwrap_or(false)))
    }

    /// Fetches the chunks' bytes, with a few large reads of an origin at once. They are checked
    /// when they are read. Chunks of parents are not fetched. Up to 4 MiB of what was fetched also
    /// stays in `decoder`.
    ///
    /// # Errors
    ///
    /// If a chunk's place can't be read, no origin gives its bytes, or they can't be written.
    pub fn fetch_chunks(&self, decoder: &mut Decoder, chunks: &[u32]) -> Result<(), ImageError> {
        let stop = decoder.stop.clone();
        self.packings.try_each(&stop, |packing| {
            packing.unwrap_or(self).fetch_own(decoder, chunks)
        })
    }

    fn fetch_own(&self, decoder: &mut Decoder, chunks: &[u32]) -> Result<(), ImageError> {
        let stop = decoder.stop.clone();
        for run in self.runs_of(chunks)? {
            if let Some(fetched) = self.fetch_part(&run, &stop)? {
                decoder.keep_fetched(fetched);
            }
        }
        Ok(())
    }

    /// Fetches these bytes of the file if they are missing.
    ///
    /// # Errors
    ///
    /// If no origin gives the bytes, or they can't be written.
    pub fn fetch_stored(&self, bytes: &Range<u64>) -> Result<(), ImageError> {
        self.fetch_part(bytes, &Stop::never()).map(drop)
    }

    fn fetch_part(&self, bytes: &Range<u64>, stop: &Stop) -> Result<Option<Fetched>, ImageError> {
        match &self.partial {
            None => Ok(None),
            Some(partial) => partial
                .fetch(bytes, stop)
                .map_err(|missing| self.failed(missing.into())),
        }
    }

    /// The ranges of the file that have to be fetched for these chunks: in the order of the file,
    /// of at most 4 MiB each, neighbours joined. Empty for a whole image.
    ///
    /// # Errors
    ///
    /// If a chunk's place can't be read or is damaged.
    pub fn runs_of(&self, chunks: &[u32]) -> Result<Vec<Range<u64>>, ImageError> {
        let Some(partial) = &self.partial else {
            return Ok(Vec::new());
        };
        let mut places = Vec::new();
        for chunk in chunks {
            places.extend(self.stored_range(*chunk)?);
        }
        places.retain(|place| !partial.has(place));
        places.sort_by_key(|place| place.start);
        let runs = runs::join(places.into_iter().map(|place| (place, ())), GAP, FETCH_MAX);
        Ok(runs.into_iter().map(|(run, _)| run).collect())
    }

    /// Fetches all that is missing, checks everything, and makes the file an ordinary image.
    /// Parents are not completed, but must be whole or have origins, since they are read. Does
    /// nothing for a whole image. If it fails, another packing is completed instead.
    ///
    /// # Errors
    ///
    /// If no packing can be completed: a part is not available or is wrong repeatedly, a parent
    /// can't be read, or the file can't be synced.
    pub fn complete(&self) -> Result<(), ImageError> {
        self.packings.try_each(&Stop::never(), |packing| {
            let reader = packing.unwrap_or(self);
            let Some(partial) = &reader.partial else {
                return Ok(());
            };
            partial.begin_completing();
            let completed = reader.complete_own(partial);
            partial.end_completing();
            completed
        })
    }

    fn complete_own(&self, partial: &PartialFile) -> Result<(), ImageError> {
        let blocks = partial.all_blocks();
        let step = FETCH_MAX / u64::from(crate::partial::blocks::BLOCK);
        let pieces = Mutex::new(blocks.step_by(step as usize));
        let failed = AtomicBool::new(false);
        let work = || -> Result<(), ImageError> {
            while !failed.load(Ordering::Relaxed) {
                let piece = pieces.lock().ok().and_then(|mut pieces| pieces.next());
                let Some(first) = piece else { break };
                let end = (first + step).min(partial.all_blocks().end);
                let fetched = partial.fetch(&partial.bytes_of(&(first..end)), &Stop::never());
                fetched.map(drop).map_err(|missing| {
                    failed.store(true, Ordering::Relaxed);
                    self.failed(missing.into())
                })?;
            }
            Ok(())
        };
        thread::scope(|scope| {
            let others: Vec<_> = (1..FETCHERS).map(|_| scope.spawn(work)).collect();
            let mut outcome = work();
            for other in others {
                let other = other.join().expect("a fetcher does not panic");
                outcome = outcome.and(other);
            }
            outcome
        })?;
        self.verify_all(partial)?;
        partial.finish().map_err(|source| {
            self.failed(Fault::Map {
                path: map_path(&self.path),
                why: source.to_string(),
            })
        })
    }

    /// Like [`verify`](ImageReader::verify), repeated until a pass finds nothing wrong: a chunk
    /// that is fetched again replaces whole blocks, and may damage other chunks that were right
    /// before.
    fn verify_all(&self, partial: &PartialFile) -> Result<(), ImageError> {
        for _ in 0..MAX_TRIES {
            let before = partial.rejections();
            self.verify()?;
            if partial.rejections() == before {
                return Ok(());
            }
        }
        let all = partial.bytes_of(&partial.all_blocks());
        let missing = Missing::new(all, "a part of them is wrong repeatedly");
        Err(self.failed(missing.into()))
    }

    pub(super) fn check_hash(
        &self,
        index: u32,
        entry: &Entry,
        chunk: &[u8],
    ) -> Result<(), ImageError> {
        if self.content_hash(index)? == Some(content_hash(chunk)) {
            return Ok(());
        }
        Err(self.damaged_chunk(index, entry, "its content hash is wrong"))
    }

    /// Reads a chunk; a wrong one is dropped and fetched from one origin after the other until it
    /// is right.
    pub(super) fn read_verified(
        &self,
        partial: &PartialFile,
        decoder: &mut Decoder,
        index: u32,
        entry: &Entry,
        chunk: &mut [u8],
    ) -> Result<(), ImageError> {
        let mut outcome = self.read_entry(decoder, index, entry, chunk);
        let own = entry.kind.is_stored();
        if let Err(error) = &outcome
            && own
            && matches!(*error.fault, Fault::Chunk { .. })
        {
            decoder.forget_fetched();
            let _alone = partial.begin_replacing(&entry.range());
            let stop = decoder.stop.clone();
            let mut is_valid = |stored: &[u8]| {
                let unpacked = self.unpack(decoder, index, entry, stored, chunk);
                unpacked
                    .and_then(|()| self.check(index, entry, chunk))
                    .is_ok()
            };
            // Another thread may have replaced it meanwhile.
            let mut stored = vec![0; entry.length as usize];
            let replaced = partial.read_present(entry.offset, &mut stored) && is_valid(&stored);
            outcome = match replaced {
                true => Ok(()),
                false => {
                    partial.reject(&entry.range());
                    partial
                        .replace(&entry.range(), &stop, &mut is_valid)
                        .map_err(|missing| self.failed(missing.into()))
                }
            };
        }
        outcome.map_err(|mut error| {
            if let Fault::Unavailable {
                chunk,
                offset,
                length,
                ..
            } = &mut *error.fault
                && own
            {
                *chunk = Some(index);
                *offset = entry.offset;
                *length = u64::from(entry.length);
            }
            error
        })
    }
}
