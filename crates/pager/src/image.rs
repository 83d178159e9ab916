//! What the pager wants of an image: its bytes, chunk by chunk.

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

/// A part of an image that cannot be had: one sentence that names the image
/// and the chunk.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unreadable(pub String);

impl Unreadable {
    /// An error and what caused it, in one sentence.
    pub fn from_error(error: &(dyn Error + 'static)) -> Unreadable {
        Unreadable(causes::sentence(error))
    }
}

/// What a chunk was found to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// All zero. The buffer was not written.
    Zero,
    /// In the buffer, after so many bytes were read from the file.
    Bytes {
        /// Bytes read from the file.
        read: u64,
    },
}

/// An image, read by many threads at once.
pub trait ChunkImage: Send + Sync {
    /// What it holds, for recordings.
    fn id(&self) -> ImageId;

    /// Bytes of the address space it holds.
    fn size(&self) -> u64;

    /// Bytes of a chunk: a power of two, 4 KiB to 2 MiB.
    fn chunk_size(&self) -> usize;

    /// Reads one chunk into `bytes`, which is as long as any chunk; the last
    /// one is padded.
    fn read(
        &self,
        decoder: &mut Decoder,
        chunk: u32,
        bytes: &mut [u8],
    ) -> Result<Content, Unreadable>;

    /// The chunks a restore needs.
    fn working_set(&self) -> Result<Vec<u32>, Unreadable> {
        Ok(Vec::new())
    }

    /// Where the bytes of a chunk are in the file, if they are there.
    fn stored(&self, _chunk: u32) -> Option<Range<u64>> {
        None
    }

    /// Reads a part of the file, as it is.
    fn read_stored(&self, offset: u64, into: &mut [u8]) -> Result<(), Unreadable> {
        let _ = (offset, into);
        Err(Unreadable("this image is in no file".into()))
    }

    /// Makes a chunk from its stored bytes.
    fn decode(
        &self,
        decoder: &mut Decoder,
        chunk: u32,
        stored: &[u8],
        into: &mut [u8],
    ) -> Result<(), Unreadable> {
        let _ = (decoder, chunk, stored, into);
        Err(Unreadable("this image is in no file".into()))
    }

    /// Whether a chunk that is stored as it is has the right bytes.
    fn check(&self, chunk: u32, bytes: &[u8]) -> Result<(), Unreadable> {
        let _ = (chunk, bytes);
        Err(Unreadable("this image is in no file".into()))
    }

    /// Says that a part of the file is read soon.
    fn will_need(&self, _range: Range<u64>) {}

    /// Whether a chunk can be read at once. If not, reading it waits for an
    /// origin, which no worker may do.
    fn is_here(&self, _chunk: u32) -> bool {
        true
    }

    /// Whether all chunks can always be read at once.
    fn is_whole(&self) -> bool {
        true
    }

    /// Has chunks here, so that they can be read, as far as they can be had.
    fn fetch(&self, _decoder: &mut Decoder, _chunks: &[u32]) -> Result<(), Unreadable> {
        Ok(())
    }

    /// Whom reading it may wait for, as [`ImageReader::waits_for`] has it.
    fn waits_for(&self) -> String {
        String::new()
    }

    /// Bytes that came from origins.
    fn fetched(&self) -> u64 {
        0
    }
}

/// What an image says it holds, and which file it is. A file that was removed may
/// have its number used anew, later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageKey {
    /// What it says.
    pub id: ImageId,
    /// Device, inode, and when it was written, nanoseconds since 1970.
    pub file: (u64, u64, i128),
}

/// An image of the store.
pub struct StoredImage {
    reader: Arc<ImageReader>,
    /// Only to give advice about it, and to know it.
    file: File,
}

impl StoredImage {
    /// Opens it.
    pub fn open(path: &Path) -> Result<StoredImage, Unreadable> {
        StoredImage::open_with(path, &Opening::default())
    }

    /// Opens one of which parts may be missing.
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

    /// Tells two files apart.
    pub fn identity(path: &Path) -> Option<(u64, u64)> {
        let meta = std::fs::metadata(path).ok()?;
        Some((meta.dev(), meta.ino()))
    }

    /// Tells it apart from every other, also from one that says it is the same.
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
            // Advice: without it reading is only slower.
            let _ = fadvise(&self.file, range.start, Some(length), Advice::WillNeed);
        }
    }

    fn is_here(&self, chunk: u32) -> bool {
        // A damaged table of chunks is told by reading.
        self.reader.is_here(chunk).unwrap_or(true)
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
