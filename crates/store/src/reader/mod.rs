//! Reads any chunk of an image at any time, from any thread.
//!
//! Opening reads header, footer and the small sections; the table of chunks is read as it is
//! needed, 64 chunks at a time, checked, and kept in a cache of bounded size. Everything is read
//! with `pread` rather than `mmap`: a failing disk or a truncated file is an error of one call, and
//! does not end the process with a SIGBUS.
//!
//! * [`groups`]: the table of chunks.
//! * [`parents`]: where parents are looked for.
//! * `packings`: the same image, packed in other ways.
//! * `stored`: the stored bytes of chunks, for those who read or copy them as they are.
//! * `verified`: chunks of a partial image ([`crate::partial`]).

mod groups;
mod packings;
pub mod parents;
mod stored;
#[cfg(test)]
mod tests;
mod verified;
mod verify;

use crate::backing::BackingFile;
use crate::codec::Decoder;
use crate::error::{Fault, ImageError};
use crate::format::{
    ContentHash, Entry, Footer, ImageId, Kind, ParentRef, chunks, header, manifest::Limits,
};
use crate::outline::{self, Outline, read_exact};
use crate::partial::blocks::{Found, PartialFile};
use crate::partial::{self, Origins};
use crate::presence::PresenceMap;
use crate::stop::Stop;
use groups::Groups;
use jiffy_sys::locked::Locked;
use packings::Packings;
use parents::Resolve;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use zstd::zstd_safe::DDict;

/// How many files of the same name may replace each other while an image is being opened.
const REPLACEMENTS: usize = 64;

/// An open image. It stays readable when its file is removed.
pub struct ImageReader {
    file: Locked,
    /// Set if the image is partial: chunks are read through it.
    partial: Option<Box<PartialFile>>,
    packings: Packings,
    path: PathBuf,
    footer: Footer,
    length: u64,
    groups: Groups,
    dictionary: Option<(Vec<u8>, DDict<'static>)>,
    parent: Option<(ParentRef, Arc<ImageReader>)>,
    backing: Option<BackingFile>,
    opened_in: Duration,
}

/// Callbacks for opening an image.
#[derive(Clone, Copy)]
pub struct Opening<'a> {
    /// Finds parents.
    pub resolve: &'a Resolve<'a>,
    /// Gives the origins of the missing parts of an image or a parent.
    pub origins: &'a Origins<'a>,
    /// Gives parents that this process has open already: a partial image can be opened only once.
    pub known: &'a Known<'a>,
}

/// Gives the image at a path, if it is open already.
pub type Known<'a> = dyn Fn(&Path) -> Option<Arc<ImageReader>> + 'a;

impl Default for Opening<'_> {
    /// Parents are files in the same folder; there are no origins.
    fn default() -> Self {
        Opening {
            resolve: &parents::in_folder,
            origins: &partial::no_origins,
            known: &|_| None,
        }
    }
}

/// Where one chunk's bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Nowhere: all are zero.
    Zero,
    /// In this file, in the parent or in the backing file.
    Entry(Entry),
}

impl Place {
    /// Its kind.
    pub fn kind(&self) -> Kind {
        match self {
            Place::Zero => Kind::Zero,
            Place::Entry(entry) => entry.kind,
        }
    }
}

impl ImageReader {
    /// Opens an image. Its parents and its backing file, if any, are files in the same folder.
    ///
    /// # Errors
    ///
    /// If the file can't be opened, locked or read, is not a valid image, or a parent or the
    /// backing file can't be used.
    pub fn open(path: &Path) -> Result<ImageReader, ImageError> {
        ImageReader::open_with(path, &Opening::default())
    }

    /// Opens an image whose parents `resolve` finds.
    ///
    /// # Errors
    ///
    /// As for [`ImageReader::open`], or if `resolve` fails.
    pub fn open_with_parents(
        path: &Path,
        resolve: &Resolve<'_>,
    ) -> Result<ImageReader, ImageError> {
        let opening = Opening {
            resolve,
            ..Opening::default()
        };
        ImageReader::open_with(path, &opening)
    }

    /// Opens an image that may be partial ([`crate::partial`]), as may its parents. It is read like
    /// any other; missing bytes are fetched, and every chunk is checked against its content hash.
    /// Only one process may have a partial image open.
    ///
    /// # Errors
    ///
    /// As for [`ImageReader::open`], or if the map of a partial image is not valid or in use.
    pub fn open_with(path: &Path, opening: &Opening<'_>) -> Result<ImageReader, ImageError> {
        ImageReader::open_at_depth(path, opening, 0)
    }

    /// Opens an image without a name: `path` is used for messages and to find parents and a backing
    /// file.
    ///
    /// # Errors
    ///
    /// If the file can't be read, is not a valid image, or a parent or the backing file can't be
    /// used.
    pub fn from_file(
        file: File,
        path: &Path,
        resolve: &Resolve<'_>,
    ) -> Result<ImageReader, ImageError> {
        let opening = Opening {
            resolve,
            ..Opening::default()
        };
        ImageReader::read(Locked::held_elsewhere(file), None, path, &opening, 0)
    }

    fn open_at_depth(
        path: &Path,
        opening: &Opening<'_>,
        depth: usize,
    ) -> Result<ImageReader, ImageError> {
        let failed = |fault| ImageError::new(path, fault);
        let file = open_locked(path).map_err(|error| failed(Fault::Open(error)))?;
        let map = verified::open_map(path).map_err(failed)?;
        ImageReader::read(file, map, path, opening, depth)
    }

    fn read(
        file: Locked,
        map: Option<PresenceMap>,
        path: &Path,
        opening: &Opening<'_>,
        depth: usize,
    ) -> Result<ImageReader, ImageError> {
        let failed = |fault| ImageError::new(path, fault);
        let begun = Instant::now();
        let length = file
            .metadata()
            .map_err(|error| failed(Fault::Open(error)))?
            .len();
        let Outline {
            footer,
            parent,
            backing,
        } = Outline::of(&file, length).map_err(failed)?;
        if map.is_some() && backing.is_some() {
            return Err(failed(partial::with_backing(&footer)));
        }
        let dictionary = outline::dictionary(&file, &footer).map_err(failed)?;
        let parent = match parent {
            Some(reference) => {
                let reader =
                    parents::open(path, &reference, &footer, opening, depth).map_err(failed)?;
                Some((reference, reader))
            }
            None => None,
        };
        let backing = backing
            .map(|reference| BackingFile::beside(path, reference))
            .transpose()
            .map_err(failed)?;
        let limits = Limits {
            chunk_size: footer.chunk_size,
            data: (header::BYTES as u64, footer.data_end()),
            parent: parent.is_some(),
            dictionary: dictionary.is_some(),
            backing: backing.as_ref().map(|backing| backing.reference().size),
        };
        let chunks = chunks(footer.size, footer.chunk_size).unwrap_or(0);
        let partial = map
            .map(|map| verified::open_partial(map, path, length, &footer, opening))
            .transpose()
            .map_err(failed)?;
        Ok(ImageReader {
            groups: Groups::new(&footer, chunks, limits),
            file,
            partial: partial.map(Box::new),
            packings: Packings::default(),
            path: path.to_owned(),
            footer,
            length,
            dictionary,
            parent,
            backing,
            opened_in: begun.elapsed(),
        })
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The id of its contents; equal contents have equal ids.
    pub fn id(&self) -> ImageId {
        self.footer.id
    }

    /// Bytes of the contents.
    pub fn size(&self) -> u64 {
        self.footer.size
    }

    /// Bytes of a chunk. The last one is padded with zeros.
    pub fn chunk_size(&self) -> u32 {
        self.footer.chunk_size
    }

    /// How many chunks it has.
    pub fn chunks(&self) -> u32 {
        self.groups.chunks
    }

    /// Bytes of the file.
    pub fn file_bytes(&self) -> u64 {
        self.length
    }

    /// Bytes of the file that are not chunks.
    pub fn metadata_bytes(&self) -> u64 {
        header::BYTES as u64 + self.length - self.footer.data_end()
    }

    /// How long it took to open it and its parents.
    pub fn opened_in(&self) -> Duration {
        self.opened_in
    }

    /// The parent it names.
    pub fn parent(&self) -> Option<(&ParentRef, &Arc<ImageReader>)> {
        self.parent
            .as_ref()
            .map(|(reference, reader)| (reference, reader))
    }

    /// The backing file it names.
    pub fn backing(&self) -> Option<&BackingFile> {
        self.backing.as_ref()
    }

    /// The dictionary its zstd chunks may need.
    pub fn dictionary(&self) -> Option<&[u8]> {
        self.dictionary.as_ref().map(|(bytes, _)| &bytes[..])
    }

    /// Where a chunk's bytes are.
    ///
    /// # Errors
    ///
    /// If there is no such chunk, or its group can't be read or is damaged.
    pub fn place(&self, index: u32) -> Result<Place, ImageError> {
        self.groups
            .place(&self.file, index)
            .map(|(place, _)| place)
            .map_err(|fault| self.failed(fault))
    }

    /// How a chunk is stored.
    ///
    /// # Errors
    ///
    /// As for [`ImageReader::place`].
    pub fn kind(&self, index: u32) -> Result<Kind, ImageError> {
        Ok(self.place(index)?.kind())
    }

    /// A chunk's content hash; `None` for a zero chunk.
    ///
    /// # Errors
    ///
    /// As for [`ImageReader::place`], or if the hash can't be read.
    pub fn content_hash(&self, index: u32) -> Result<Option<ContentHash>, ImageError> {
        let found = self
            .groups
            .place(&self.file, index)
            .and_then(|(place, number)| {
                let hashes = &self.footer.hashes;
                Ok(match place {
                    Place::Zero => None,
                    Place::Entry(_) => {
                        let mut hash = ContentHash::default();
                        let at = u64::from(number) * hash.len() as u64;
                        read_exact(&self.file, hashes.offset + at, &mut hash)?;
                        Some(hash)
                    }
                })
            });
        found.map_err(|fault| self.failed(fault))
    }

    /// Reads a chunk into `chunk`, which is as long as a chunk, and checks it. For many chunks,
    /// [`ImageReader::read_chunk_with`] saves allocations.
    ///
    /// # Errors
    ///
    /// If there is no such chunk, its bytes can't be read or fetched, or they are damaged.
    pub fn read_chunk(&self, index: u32, chunk: &mut [u8]) -> Result<(), ImageError> {
        self.read_chunk_with(&mut Decoder::new(), index, chunk)
    }

    /// Reads a chunk into `chunk`, which is as long as a chunk, and checks it.
    ///
    /// # Errors
    ///
    /// As for [`ImageReader::read_chunk`].
    ///
    /// # Panics
    ///
    /// If `chunk` has another length than [`ImageReader::chunk_size`].
    pub fn read_chunk_with(
        &self,
        decoder: &mut Decoder,
        index: u32,
        chunk: &mut [u8],
    ) -> Result<(), ImageError> {
        match self.place(index)? {
            Place::Zero => {
                self.assert_length(chunk);
                chunk.fill(0);
                Ok(())
            }
            Place::Entry(entry) => self.read_at(decoder, index, &entry, chunk),
        }
    }

    /// Reads a chunk at the place that [`ImageReader::place`] returned, and checks it.
    ///
    /// # Errors
    ///
    /// If the bytes can't be read or fetched, or are damaged.
    ///
    /// # Panics
    ///
    /// If `chunk` has another length than [`ImageReader::chunk_size`].
    pub fn read_at(
        &self,
        decoder: &mut Decoder,
        index: u32,
        entry: &Entry,
        chunk: &mut [u8],
    ) -> Result<(), ImageError> {
        self.assert_length(chunk);
        let Some(partial) = &self.partial else {
            return self.read_entry(decoder, index, entry, chunk);
        };
        let stop = decoder.stop.clone();
        self.packings.try_each(&stop, |packing| match packing {
            None => self.read_verified(partial, decoder, index, entry, chunk),
            Some(other) => other.read_chunk_with(decoder, index, chunk),
        })
    }

    fn read_entry(
        &self,
        decoder: &mut Decoder,
        index: u32,
        entry: &Entry,
        chunk: &mut [u8],
    ) -> Result<(), ImageError> {
        match entry.kind {
            Kind::Parent => {
                self.parent_reader(index)?
                    .read_chunk_with(decoder, index, chunk)?;
            }
            // Its length is that of a chunk (`Limits`).
            Kind::Raw => match self.fetched(decoder, entry)? {
                Some(found) => chunk.copy_from_slice(&found),
                None => self.read_part(entry.offset, chunk, &decoder.stop)?,
            },
            Kind::Backing => {
                let read = self.backing_file(index)?.read(index, entry, chunk);
                return read.map_err(|fault| self.failed(fault));
            }
            _ => match self.fetched(decoder, entry)? {
                Some(found) => self.unpack(decoder, index, entry, &found, chunk)?,
                None => {
                    // A chunk takes at most its own size. The buffer is kept, because growing it is
                    // slow.
                    decoder.grow(chunk.len());
                    let mut scratch = std::mem::take(&mut decoder.scratch);
                    let stored = &mut scratch[..entry.length as usize];
                    let unpacked = self
                        .read_part(entry.offset, stored, &decoder.stop)
                        .and_then(|()| self.unpack(decoder, index, entry, stored, chunk));
                    decoder.scratch = scratch;
                    unpacked?;
                }
            },
        }
        self.check(index, entry, chunk)
    }

    /// The stored bytes of a chunk that had to be fetched, from memory, to avoid reading them back
    /// from the file. `None` if they are in the file.
    fn fetched(&self, decoder: &mut Decoder, entry: &Entry) -> Result<Option<Found>, ImageError> {
        let Some(partial) = &self.partial else {
            return Ok(None);
        };
        let range = entry.range();
        let found = decoder.find_fetched(partial, &range);
        if found.is_some() || partial.has(&range) {
            return Ok(found);
        }
        let fetched = partial.fetch_into_memory(&range, &decoder.stop);
        let fetched = fetched.map_err(|missing| self.failed(missing.into()))?;
        let found = fetched
            .as_ref()
            .and_then(|fetched| fetched.find(partial, &range));
        if let Some(fetched) = fetched {
            decoder.keep_fetched(fetched);
        }
        Ok(found)
    }

    fn read_part(&self, offset: u64, bytes: &mut [u8], stop: &Stop) -> Result<(), ImageError> {
        match &self.partial {
            None => read_exact(&self.file, offset, bytes),
            Some(partial) => partial.read(offset, bytes, stop),
        }
        .map_err(|fault| self.failed(fault))
    }

    fn unpack(
        &self,
        decoder: &mut Decoder,
        index: u32,
        entry: &Entry,
        stored: &[u8],
        chunk: &mut [u8],
    ) -> Result<(), ImageError> {
        let dictionary = self.dictionary.as_ref().map(|(_, prepared)| prepared);
        decoder
            .unpack(entry.kind, stored, dictionary, chunk)
            .map_err(|what| self.damaged_chunk(index, entry, what))
    }

    fn check(&self, index: u32, entry: &Entry, chunk: &[u8]) -> Result<(), ImageError> {
        if crc_fast::crc32_iscsi(chunk) == entry.checksum {
            return match self.partial {
                None => Ok(()),
                Some(_) => self.check_hash(index, entry, chunk),
            };
        }
        Err(self.damaged_chunk(
            index,
            entry,
            match entry.kind {
                Kind::Parent => "the parent has other contents",
                _ => "its checksum is wrong",
            },
        ))
    }

    fn parent_reader(&self, index: u32) -> Result<&ImageReader, ImageError> {
        match &self.parent {
            Some((_, parent)) => Ok(parent),
            None => Err(self.failed(Fault::Chunk {
                index,
                offset: 0,
                what: "it is in the parent, and there is none",
            })),
        }
    }

    fn backing_file(&self, index: u32) -> Result<&BackingFile, ImageError> {
        self.backing.as_ref().ok_or_else(|| {
            self.failed(Fault::Chunk {
                index,
                offset: 0,
                what: "it is in a backing file, and there is none",
            })
        })
    }

    fn damaged_chunk(&self, index: u32, entry: &Entry, what: &'static str) -> ImageError {
        let offset = entry.offset;
        self.failed(Fault::Chunk {
            index,
            offset,
            what,
        })
    }

    fn failed(&self, fault: Fault) -> ImageError {
        ImageError::new(&self.path, fault)
    }

    fn assert_length(&self, chunk: &[u8]) {
        assert_eq!(
            chunk.len(),
            self.chunk_size() as usize,
            "the buffer must be as long as a chunk"
        );
    }
}

impl std::fmt::Debug for ImageReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ImageReader")
            .field("path", &self.path)
            .field("id", &self.footer.id)
            .finish_non_exhaustive()
    }
}

/// Opens a file and locks it, shared, for as long as it is open, so that the garbage collector
/// keeps it.
fn open_locked(path: &Path) -> io::Result<Locked> {
    for _ in 0..REPLACEMENTS {
        let file = Locked::shared(jiffy_sys::regular::open(path)?)?;
        if file.metadata()?.nlink() > 0 {
            return Ok(file);
        }
        // It was removed before it was locked. Another file may have its name now.
    }
    Err(io::ErrorKind::NotFound.into())
}
