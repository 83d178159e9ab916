//! The pager's interface to an image: its bytes, chunk by chunk.

use jiffy_store::reader::{Opening, Place};
use jiffy_store::{Decoder, ImageId, ImageReader, Kind};
use jiffy_sys::causes;
use rustix::fs::{Advice, fadvise};
use std::error::Error;
use std::fs::File;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

/// A part of an image cannot be read. The message is one sentence that names the image and the
/// chunk.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unreadable(pub String);

impl Unreadable {
    /// Joins an error and its causes into one sentence.
    pub fn from_error(error: &(dyn Error + 'static)) -> Unreadable {
        Unreadable(causes::sentence(error))
    }
}

/// The contents of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// All zero. The buffer was not written.
    Zero,
    /// The bytes are in the buffer.
    Bytes {
        /// Bytes read from the file.
        read: u64,
    },
}

/// An image, read by many threads at once.
pub trait ChunkImage: Send + Sync {
    /// The image's id, for recordings.
    fn id(&self) -> ImageId;

    /// Bytes of the address space it holds.
    fn size(&self) -> u64;

    /// Bytes of a chunk: a power of two, 4 KiB to 2 MiB.
    fn chunk_size(&self) -> usize;

    /// Reads one chunk into `bytes`, which is as long as any chunk; the last
    /// one is padded.
    ///
    /// # Errors
    ///
    /// If the chunk can't be read from the file or fetched from an origin, or does not have the
    /// right bytes.
    fn read(
        &self,
        decoder: &mut Decoder,
        chunk: u32,
        bytes: &mut [u8],
    ) -> Result<Content, Unreadable>;

    /// The chunks a restore needs.
    ///
    /// # Errors
    ///
    /// If the list can't be read.
    fn working_set(&self) -> Result<Vec<u32>, Unreadable> {
        Ok(Vec::new())
    }

    /// The range of the file with the stored bytes of a chunk, if the file has them.
    fn stored(&self, _chunk: u32) -> Option<Range<u64>> {
        None
    }

    /// Reads a range of the file, without decoding.
    ///
    /// # Errors
    ///
    /// If the image has no file, or it can't be read.
    fn read_stored(&self, offset: u64, into: &mut [u8]) -> Result<(), Unreadable> {
        let _ = (offset, into);
        Err(Unreadable("this image has no file".into()))
    }

    /// Makes a chunk from its stored bytes.
    ///
    /// # Errors
    ///
    /// If the image has no file, or the bytes are not those of the chunk.
    fn decode(
        &self,
        decoder: &mut Decoder,
        chunk: u32,
        stored: &[u8],
        into: &mut [u8],
    ) -> Result<(), Unreadable> {
        let _ = (decoder, chunk, stored, into);
        Err(Unreadable("this image has no file".into()))
    }

    /// Checks that a chunk that is stored as it is has the right bytes.
    ///
    /// # Errors
    ///
    /// If it does not.
    fn check(&self, chunk: u32, bytes: &[u8]) -> Result<(), Unreadable> {
        let _ = (chunk, bytes);
        Err(Unreadable("this image has no file".into()))
    }

    /// Advises the kernel that a range of the file is read soon.
    fn will_need(&self, _range: Range<u64>) {}

    /// Whether a chunk can be read at once. If not, reading it waits for an origin, which a worker
    /// must not do.
    fn is_local(&self, _chunk: u32) -> bool {
        true
    }

    /// Whether all chunks can always be read at once.
    fn is_whole(&self) -> bool {
        true
    }

    /// Fetches chunks from origins as far as possible, so that they can be read at once.
    ///
    /// # Errors
    ///
    /// If a chunk can't be fetched.
    fn fetch(&self, _decoder: &mut Decoder, _chunks: &[u32]) -> Result<(), Unreadable> {
        Ok(())
    }

    /// The registries that a read may wait for, as in [`ImageReader::waits_for`].
    fn waits_for(&self) -> String {
        String::new()
    }

    /// Bytes that were fetched from origins.
    fn fetched(&self) -> u64 {
        0
    }
}

/// Identifies an image by its id and its file. The inode number of a removed file may be reused, so
/// the time of the last write is part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageKey {
    /// The id that the image gives for its contents.
    pub id: ImageId,
    /// Device, inode, and when it was written, nanoseconds since 1970.
    pub file: (u64, u64, i128),
}

/// An image of the store.
pub struct StoredImage {
    reader: Arc<ImageReader>,
    /// Only used for readahead advice and to identify the file.
    file: File,
}

impl StoredImage {
    /// Opens an image that needs no origins.
    ///
    /// # Errors
    ///
    /// If it or a parent can't be read, or is damaged or of another version.
    pub fn open(path: &Path) -> Result<StoredImage, Unreadable> {
        StoredImage::open_with(path, &Opening::default())
    }

    /// Opens an image that may be partial.
    ///
    /// # Errors
    ///
    /// If it or a parent can't be read or found, or is damaged or of another version.
    pub fn open_with(path: &Path, opening: &Opening<'_>) -> Result<StoredImage, Unreadable> {
        let reader = match (opening.known)(path) {
            Some(reader) => reader,
            None => Arc::new(
                ImageReader::open_with(path, opening)
                    .map_err(|error| Unreadable::from_error(&error))?,
            ),
        };
        let file = File::open(path)
            .map_err(|error| Unreadable(format!("{} cannot be opened: {error}", path.display())))?;
        Ok(StoredImage { reader, file })
    }

    /// Device and inode, which identify a file.
    pub fn identity(path: &Path) -> Option<(u64, u64)> {
        let meta = std::fs::metadata(path).ok()?;
        Some((meta.dev(), meta.ino()))
    }

    /// Identifies the image, even among files that claim the same id.
    pub fn key(&self) -> Option<ImageKey> {
        let meta = self.file.metadata().ok()?;
        let modified = i128::from(meta.mtime()) * 1_000_000_000 + i128::from(meta.mtime_nsec());
        Some(ImageKey {
            id: self.reader.id(),
            file: (meta.dev(), meta.ino(), modified),
        })
    }

    /// The image itself.
    pub fn reader(&self) -> &Arc<ImageReader> {
        &self.reader
    }
}

fn unreadable(error: jiffy_store::ImageError) -> Unreadable {
    Unreadable::from_error(&error)
}

impl ChunkImage for StoredImage {
    fn id(&self) -> ImageId {
        self.reader.id()
    }

    fn size(&self) -> u64 {
        self.reader.size()
    }

    fn chunk_size(&self) -> usize {
        self.reader.chunk_size() as usize
    }

    fn read(
        &self,
        decoder: &mut Decoder,
        chunk: u32,
        bytes: &mut [u8],
    ) -> Result<Content, Unreadable> {
        match self.reader.place(chunk).map_err(unreadable)? {
            Place::Zero => Ok(Content::Zero),
            Place::Entry(entry) => {
                self.reader
                    .read_at(decoder, chunk, &entry, bytes)
                    .map_err(unreadable)?;
                let read = match entry.kind {
                    Kind::Parent | Kind::Backing => bytes.len() as u64,
                    _ => u64::from(entry.length),
                };
                Ok(Content::Bytes { read })
            }
        }
    }

    fn working_set(&self) -> Result<Vec<u32>, Unreadable> {
        let ranges = self.reader.working_set().map_err(unreadable)?;
        Ok(ranges.into_iter().flatten().collect())
    }

    fn stored(&self, chunk: u32) -> Option<Range<u64>> {
        self.reader.stored_range(chunk).ok().flatten()
    }

    fn read_stored(&self, offset: u64, into: &mut [u8]) -> Result<(), Unreadable> {
        self.reader.read_stored(offset, into).map_err(unreadable)
    }

    fn decode(
        &self,
        decoder: &mut Decoder,
        chunk: u32,
        stored: &[u8],
        into: &mut [u8],
    ) -> Result<(), Unreadable> {
        self.reader
            .decode(decoder, chunk, stored, into)
            .map_err(unreadable)
    }

    fn check(&self, chunk: u32, bytes: &[u8]) -> Result<(), Unreadable> {
        self.reader.check_raw(chunk, bytes).map_err(unreadable)
    }

    fn will_need(&self, range: Range<u64>) {
        if let Some(length) = NonZeroU64::new(range.end - range.start) {
            // Only advice: without it, reads are slower.
            let _ = fadvise(&self.file, range.start, Some(length), Advice::WillNeed);
        }
    }

    fn is_local(&self, chunk: u32) -> bool {
        // If the table of chunks is damaged, the read reports it.
        self.reader.is_local(chunk).unwrap_or(true)
    }

    fn is_whole(&self) -> bool {
        let mut generation = Some(&self.reader);
        while let Some(reader) = generation {
            if reader.is_partial() {
                return false;
            }
            generation = reader.parent().map(|(_, parent)| parent);
        }
        true
    }

    fn fetch(&self, decoder: &mut Decoder, chunks: &[u32]) -> Result<(), Unreadable> {
        let fetched = self.reader.fetch_chunks(decoder, chunks);
        fetched.map_err(unreadable)
    }

    fn waits_for(&self) -> String {
        self.reader.waits_for()
    }

    fn fetched(&self) -> u64 {
        self.reader.fetched_bytes()
    }
}
