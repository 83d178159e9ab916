//! A disk's bytes in a sparse file, chunk by chunk as they are needed, and the
//! map of what is there: what VMMs read instead of an image
//! (`docs/disk-cache.md`).
//!
//! A cache is only ever a copy. After the host lost its power its bits may
//! have reached the disk before the bytes, so bits are bound to a boot of the
//! host, unless the cache was closed in order; those of another boot are
//! forgotten, and the chunks come from the image once more.

#[cfg(test)]
mod tests;
mod trim;

pub use trim::{Parts, trim, trim_others};

use crate::error::ImageError;
use crate::format::{ImageId, Kind};
use crate::presence::{PresenceError, PresenceFault, PresenceMap};
use crate::reader::ImageReader;
use crate::sparse::SparseFile;
pub use crate::sparse::{Claim, Flight};
use jiffy_sys::locked::{Locked, lock_alone};
use jiffy_sys::{clock, durable};
use jiffy_wire::disk::{CONTENTS, MAP_HEADER, MapHeader, PRESENT};
use rustix::fs::{FlockOperation, flock};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{PoisonError, RwLock};

/// Times that a cache is opened anew because it was removed meanwhile.
const TRIES: u32 = 16;

/// What a disk's length is a multiple of.
const BLOCK: u64 = 4096;

/// A cache that cannot be used. One sentence that names it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// The host cannot make, read or write it.
    #[error("the disk cache {} cannot be used", .0.display())]
    Io(PathBuf, #[source] io::Error),
    /// Another process fills it.
    #[error("the disk cache {} is filled by another process", .0.display())]
    InUse(PathBuf),
    /// It holds another image, and a VM reads it.
    #[error("the disk cache {} holds another image, and a VM uses it", .0.display())]
    OtherImage(PathBuf),
    /// It was closed.
    #[error("the disk cache {} is closed", .0.display())]
    Closed(PathBuf),
    /// The image cannot be read.
    #[error(transparent)]
    Image(#[from] ImageError),
}

impl CacheError {
    /// Whether its file system is full, or its owner may have no more of it.
    pub fn is_for_want_of_room(&self) -> bool {
        let CacheError::Io(_, error) = self else {
            return false;
        };
        matches!(
            error.kind(),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
        )
    }
}

/// Caches are opened by many, and given up by one alone.
static GIVING_UP: RwLock<()> = RwLock::new(());

/// A cache, open to be filled by this process alone.
#[derive(Debug)]
pub struct DiskCache {
    sparse: SparseFile<()>,
    folder: PathBuf,
    /// Whether it was closed; held while chunks are put there.
    closed: RwLock<bool>,
}

impl DiskCache {
    /// Opens the cache in `folder`, which is made if it is missing. What it
    /// holds of another image is dropped, unless a VM uses it. Chunks that are
    /// zero are there from the beginning.
    pub fn open(folder: &Path, image: &ImageReader) -> Result<DiskCache, CacheError> {
        for _ in 0..TRIES {
            let cache = DiskCache::try_open(folder, image)?;
            // From here on nobody removes it, but somebody may have done so before its
            // map was locked.
            if is_at(&folder.join(CONTENTS), cache.sparse.file()) {
                return Ok(cache);
            }
        }
        Err(CacheError::InUse(folder.to_owned()))
    }

    fn try_open(folder: &Path, image: &ImageReader) -> Result<DiskCache, CacheError> {
        let failed = |error| CacheError::Io(folder.to_owned(), error);
        let _whole = GIVING_UP.read().unwrap_or_else(PoisonError::into_inner);
        let boot = boot_id().map_err(failed)?;
        make_folder(folder).map_err(failed)?;
        let length = image.size().next_multiple_of(BLOCK);
        let wanted = MapHeader {
            unit: image.chunk_size(),
            length,
            tail: length,
            image: image.id().0,
            boot,
        };
        let mut contents = open_contents(folder).map_err(failed)?;
        let mut of_another_boot = false;
        let known = match PresenceMap::open(&folder.join(PRESENT)) {
            Ok(map) => Some(map).filter(|map| {
                let head = map.header();
                let valid = head.boot == boot || head.boot == [0; 16];
                of_another_boot = !valid;
                let fits = MapHeader { boot, ..*head } == wanted;
                valid && fits && contents.metadata().is_ok_and(|meta| meta.len() == length)
            }),
            Err(PresenceError {
                fault: PresenceFault::InUse,
                ..
            }) => return Err(CacheError::InUse(folder.to_owned())),
            // Missing or damaged.
            Err(_) => None,
        };
        let map = match known {
            Some(map) => {
                // That waits for the disk.
                if map.header().boot != boot {
                    map.bind(boot).map_err(failed)?;
                }
                map
            }
            None => {
                contents = own_contents(folder, contents, of_another_boot)?;
                begin(folder, &contents, wanted, image)?
            }
        };
        map.touch();
        Ok(DiskCache {
            sparse: SparseFile::new(Locked::by_others(contents), map, 0..length),
            folder: folder.to_owned(),
            closed: RwLock::new(false),
        })
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    fn map(&self) -> &PresenceMap {
        self.sparse.map()
    }

    /// How many chunks there are.
    pub fn chunks(&self) -> u32 {
        self.map().units() as u32
    }

    /// The chunks that hold these bytes.
    pub fn chunks_of(&self, bytes: &Range<u64>) -> Range<u32> {
        chunks(self.map().units_of(bytes))
    }

    /// Bytes of the disk.
    pub fn length(&self) -> u64 {
        self.map().header().length
    }

    /// Whether a chunk is there.
    pub fn has(&self, chunk: u32) -> bool {
        self.map().get(chunk.into())
    }

    /// Whether all of these are.
    pub fn has_all(&self, chunks: Range<u32>) -> bool {
        self.map().has_all(units(&chunks))
    }

    /// Whether everything is.
    pub fn is_full(&self) -> bool {
        self.map().has_all(0..self.map().units())
    }

    /// The next run of chunks that are not there.
    pub fn next_missing(&self, wanted: Range<u32>) -> Option<Range<u32>> {
        self.map().next_missing(units(&wanted)).map(chunks)
    }

    /// What one thread is to do next so that these chunks are there: at most so many at
    /// once.
    pub fn claim(&self, wanted: &Range<u32>, most: u32) -> Claim<()> {
        self.sparse.claim(&units(wanted), most.into())
    }

    /// Ends what was claimed to be filled, whatever became of it.
    pub fn land(&self, flight: &Flight<()>) {
        self.sparse.land(flight, ());
    }

    /// Waits for another thread that fills chunks.
    pub fn wait(&self, flight: &Flight<()>) {
        self.sparse.wait(flight);
    }

    /// Puts chunks there that follow one another, whole ones, and then says
    /// so.
    pub fn put(&self, first: u32, bytes: &[u8]) -> Result<(), CacheError> {
        let closed = self.closed.read().unwrap_or_else(PoisonError::into_inner);
        if *closed {
            return Err(CacheError::Closed(self.folder.clone()));
        }
        let unit = u64::from(self.map().header().unit);
        let start = u64::from(first);
        let chunks = start..start + bytes.len() as u64 / unit;
        let place = self.sparse.bytes_of(&chunks);
        let bytes = &bytes[..(place.end - place.start) as usize];
        self.sparse
            .put(chunks, bytes)
            .map_err(|error| CacheError::Io(self.folder.clone(), error))
    }

    /// Reads a chunk into bytes that are as long as one; the last is padded. False if it is
    /// not there.
    pub fn read(&self, chunk: u32, bytes: &mut [u8]) -> io::Result<bool> {
        let start = u64::from(chunk);
        let place = self.sparse.bytes_of(&(start..start + 1));
        let (there, padding) = bytes.split_at_mut((place.end - place.start) as usize);
        padding.fill(0);
        self.sparse.read(place.start, there)
    }

    /// Syncs what is there, so that it outlives a loss of power. Nobody puts
    /// chunks there from then on, and others may open the cache although this is
    /// not dropped yet.
    pub fn close(&self) -> Result<(), CacheError> {
        let mut closed = self.closed.write().unwrap_or_else(PoisonError::into_inner);
        if *closed {
            return Ok(());
        }
        *closed = true;
        let synced = self
            .sparse
            .file()
            .sync_data()
            .and_then(|()| self.map().bind([0; 16]))
            .and_then(|()| self.map().sync());
        self.map().release();
        synced.map_err(|error| CacheError::Io(self.folder.clone(), error))
    }
}

impl Drop for DiskCache {
    fn drop(&mut self) {
        self.map().touch();
    }
}

fn units(chunks: &Range<u32>) -> Range<u64> {
    chunks.start.into()..chunks.end.into()
}

/// A disk has at most 2³² - 1 chunks.
fn chunks(units: Range<u64>) -> Range<u32> {
    units.start as u32..units.end as u32
}

/// Whether the cache in `folder` holds all of its disk, so that a VM needs no
/// pager for it; false if it is none, or one that another boot left open.
pub fn is_full(folder: &Path) -> bool {
    let read = || -> io::Result<bool> {
        let file = File::open(folder.join(PRESENT))?;
        let length = file.metadata()?.len();
        let mut head = [0; MAP_HEADER];
        file.read_exact_at(&mut head, 0)?;
        let head = MapHeader::decode(&head, length).map_err(io::Error::other)?;
        let contents = fs::metadata(folder.join(CONTENTS))?;
        let valid = head.boot == [0; 16] || head.boot == boot_id()?;
        let mut bits = vec![0; (length - MAP_HEADER as u64) as usize];
        file.read_exact_at(&mut bits, MAP_HEADER as u64)?;
        let (words, _) = bits.as_chunks();
        let count: u64 = words
            .iter()
            .map(|word| u64::from(u64::from_le_bytes(*word).count_ones()))
            .sum();
        Ok(valid && contents.len() == head.length && count == head.units())
    };
    read().unwrap_or(false)
}

/// Removes a cache that nobody uses. The bytes it gave back; `None` if it is in
/// use, or is none.
pub fn remove(folder: &Path) -> io::Result<Option<u64>> {
    let contents = match File::open(folder.join(CONTENTS)) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let Some(contents) = Locked::alone(contents)? else {
        return Ok(None);
    };
    // Locked until both are gone: nobody opens the one to find the other gone.
    let _map = match PresenceMap::open(&folder.join(PRESENT)) {
        Ok(map) => Some(map),
        Err(error) if matches!(error.fault, PresenceFault::InUse) => return Ok(None),
        // Whatever is there means nothing without the other.
        Err(_) => None,
    };
    let bytes = contents.metadata()?.blocks() * 512;
    durable::remove(&folder.join(PRESENT))?;
    fs::remove_file(folder.join(CONTENTS))?;
    // Others may keep files there.
    let _ = fs::remove_dir(folder);
    Ok(Some(bytes))
}

/// Whether the file of this name is the one that is open.
fn is_at(path: &Path, file: &File) -> bool {
    let number = |data: io::Result<fs::Metadata>| data.ok().map(|it| (it.dev(), it.ino()));
    number(fs::metadata(path)) == number(file.metadata())
}

fn open_contents(folder: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(folder.join(CONTENTS))
}

/// The file, or a new one in its place if a snapshot's root file system is a
/// further name of the same bytes: those are not the cache's to drop. Locked
/// alone.
fn own_contents(folder: &Path, contents: File, of_another_boot: bool) -> Result<File, CacheError> {
    let failed = |error| CacheError::Io(folder.to_owned(), error);
    let linked = contents.metadata().map_err(failed)?.nlink() > 1;
    // Who has it open when its map is of another boot is a VM of the snapshot.
    let of_a_snapshot = linked && of_another_boot;
    if !lock_alone(&contents).map_err(failed)? && !of_a_snapshot {
        return Err(CacheError::OtherImage(folder.to_owned()));
    }
    if !linked {
        return Ok(contents);
    }
    flock(&contents, FlockOperation::Unlock).map_err(|error| failed(error.into()))?;
    fs::remove_file(folder.join(CONTENTS)).map_err(failed)?;
    let contents = open_contents(folder).map_err(failed)?;
    match lock_alone(&contents).map_err(failed)? {
        true => Ok(contents),
        false => Err(CacheError::InUse(folder.to_owned())),
    }
}

/// Begins anew: nothing is there but what is zero. The file is locked alone.
fn begin(
    folder: &Path,
    contents: &File,
    wanted: MapHeader,
    image: &ImageReader,
) -> Result<PresenceMap, CacheError> {
    let failed = |error| CacheError::Io(folder.to_owned(), error);
    let map =
        PresenceMap::create(&folder.join(PRESENT), wanted).map_err(|error| match error.fault {
            PresenceFault::Io(error) => failed(error),
            _ => CacheError::InUse(folder.to_owned()),
        })?;
    contents
        .set_len(0)
        .and_then(|()| contents.set_len(wanted.length))
        .map_err(failed)?;
    let mut zeros = 0..0;
    for chunk in 0..image.chunks() {
        if image.kind(chunk)? == Kind::Zero {
            if zeros.end != chunk {
                map.set(u64::from(zeros.start)..zeros.end.into())
                    .map_err(failed)?;
                zeros = chunk..chunk;
            }
            zeros.end = chunk + 1;
        }
    }
    map.set(u64::from(zeros.start)..zeros.end.into())
        .map_err(failed)?;
    // VMs lock it with others.
    flock(contents, FlockOperation::Unlock).map_err(|error| failed(error.into()))?;
    Ok(map)
}

fn make_folder(folder: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        result => result,
    }
}

/// The host's boot, as `/proc` has it.
fn boot_id() -> io::Result<[u8; 16]> {
    let text = clock::boot_id()?;
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    let mut id = [0; 16];
    for (byte, pair) in id.iter_mut().zip(digits.chunks_exact(2)) {
        let pair = str::from_utf8(pair).map_err(io::Error::other)?;
        *byte = u8::from_str_radix(pair, 16).map_err(io::Error::other)?;
    }
    match id {
        // This means "any boot" in a map.
        [0, ..] if id == [0; 16] => Err(io::Error::other("the host has no boot id")),
        id => Ok(id),
    }
}

/// What a cache holds, for messages.
pub fn image_of(folder: &Path) -> io::Result<ImageId> {
    let file = File::open(folder.join(PRESENT))?;
    let mut head = [0; MAP_HEADER];
    file.read_exact_at(&mut head, 0)?;
    let head = MapHeader::decode(&head, file.metadata()?.len()).map_err(io::Error::other)?;
    Ok(ImageId(head.image))
}
