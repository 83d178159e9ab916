//! A disk's bytes in a sparse file, filled chunk by chunk on demand, with a map of the chunks that
//! are present. VMMs read it instead of an image (`docs/disk-cache.md`).
//!
//! A cache is only ever a copy. After a loss of power, bits of the map may have reached the disk
//! before the bytes they stand for. So the map is bound to one boot of the host unless the cache
//! was closed in order; a map of another boot is discarded, and its chunks are read from the image
//! again.

#[cfg(test)]
mod tests;
mod trim;

pub use trim::{Parts, trim, trim_others};

use crate::error::ImageError;
use crate::format::{ImageId, Kind};
use crate::presence::{PresenceError, PresenceFault, PresenceMap, ReadMap};
use crate::reader::ImageReader;
use crate::sparse::SparseFile;
pub use crate::sparse::{Claim, Flight};
use jiffy_sys::locked::{Locked, try_lock_exclusive};
use jiffy_sys::mutex::{read, write};
use jiffy_sys::{clock, durable};
use jiffy_wire::disk::{CONTENTS, MAP_HEADER, MapHeader, PRESENT};
use rustix::fs::{FlockOperation, flock};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::RwLock;

/// How often opening is retried if the cache is removed meanwhile.
const MAX_TRIES: u32 = 16;

/// A disk's length is a multiple of this, bytes.
const BLOCK: u64 = 4096;

/// Why a cache cannot be used. The message is one sentence that names the cache.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// The host cannot create, read or write it.
    #[error("the disk cache {} cannot be used", .0.display())]
    Io(PathBuf, #[source] io::Error),
    /// Another process is filling it.
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
    /// Whether the error is a full file system or an exceeded quota.
    pub fn is_disk_full(&self) -> bool {
        matches!(self, CacheError::Io(_, error) if jiffy_sys::durable::is_full(error))
    }
}

/// Held for reading to open a cache, for writing to trim caches.
static TRIM_LOCK: RwLock<()> = RwLock::new(());

/// A cache that this process alone may fill.
#[derive(Debug)]
pub struct DiskCache {
    sparse: SparseFile<()>,
    folder: PathBuf,
    /// Whether it was closed; held for reading while chunks are written.
    closed: RwLock<bool>,
}

impl DiskCache {
    /// Opens the cache in `folder`, and creates it if it is missing. Contents of another image are
    /// dropped, unless a VM uses them. Zero chunks are present from the beginning.
    ///
    /// # Errors
    ///
    /// If another process fills the cache, a VM reads it with another image, the image's table of
    /// chunks can't be read, or the folder or its files can't be created, read or written.
    pub fn open(folder: &Path, image: &ImageReader) -> Result<DiskCache, CacheError> {
        for _ in 0..MAX_TRIES {
            let cache = DiskCache::try_open(folder, image)?;
            // From here on the locks prevent removal, but the cache may have been removed before
            // its map was locked.
            if is_at(&folder.join(CONTENTS), cache.sparse.file()) {
                return Ok(cache);
            }
        }
        Err(CacheError::InUse(folder.to_owned()))
    }

    fn try_open(folder: &Path, image: &ImageReader) -> Result<DiskCache, CacheError> {
        let failed = |error| CacheError::Io(folder.to_owned(), error);
        let _whole = read(&TRIM_LOCK);
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
                // Only if needed: `bind` waits for the disk.
                if map.header().boot != boot {
                    map.bind(boot).map_err(failed)?;
                }
                map
            }
            None => {
                contents = exclusive_contents(folder, contents, of_another_boot)?;
                reset_map(folder, &contents, wanted, image)?
            }
        };
        map.touch();
        Ok(DiskCache {
            sparse: SparseFile::new(Locked::held_elsewhere(contents), map, 0..length),
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

    /// Whether a chunk is present.
    pub fn has(&self, chunk: u32) -> bool {
        self.map().get(chunk.into())
    }

    /// Whether all of these chunks are present.
    pub fn has_all(&self, chunks: Range<u32>) -> bool {
        self.map().has_all(units(&chunks))
    }

    /// Whether all chunks are present.
    pub fn is_full(&self) -> bool {
        self.map().has_all(0..self.map().units())
    }

    /// The next run of chunks that are not present.
    pub fn next_missing(&self, wanted: Range<u32>) -> Option<Range<u32>> {
        self.map().next_missing(units(&wanted)).map(chunks)
    }

    /// The next step of this thread to get these chunks; at most `most` chunks at once.
    pub fn claim(&self, wanted: &Range<u32>, most: u32) -> Claim<()> {
        self.sparse.claim(&units(wanted), most.into())
    }

    /// Ends a claim to fill chunks, whether they were filled or not.
    pub fn end_flight(&self, flight: &Flight<()>) {
        self.sparse.end_flight(flight, ());
    }

    /// Waits for another thread that is filling chunks.
    pub fn wait(&self, flight: &Flight<()>) {
        self.sparse.wait(flight);
    }

    /// Writes whole consecutive chunks, and then marks them as present.
    ///
    /// # Errors
    ///
    /// If the cache is closed, or its files can't be written.
    pub fn put(&self, first: u32, bytes: &[u8]) -> Result<(), CacheError> {
        let closed = read(&self.closed);
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

    /// Reads a chunk; `bytes` must be one chunk long, and the last chunk is padded. False if the
    /// chunk is not present.
    ///
    /// # Errors
    ///
    /// If the contents can't be read.
    pub fn read(&self, chunk: u32, bytes: &mut [u8]) -> io::Result<bool> {
        let start = u64::from(chunk);
        let place = self.sparse.bytes_of(&(start..start + 1));
        let (there, padding) = bytes.split_at_mut((place.end - place.start) as usize);
        padding.fill(0);
        self.sparse.read(place.start, there)
    }

    /// Syncs the contents and marks the cache as closed, so that they survive a loss of power. No
    /// chunks can be written from then on, and others may open the cache although this value is not
    /// dropped yet.
    ///
    /// # Errors
    ///
    /// If the contents or the map can't be synced. The cache is closed nevertheless.
    pub fn close(&self) -> Result<(), CacheError> {
        let mut closed = write(&self.closed);
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

/// Whether the cache in `folder` holds its whole disk, so that a VM needs no pager for it; false if
/// there is no cache, or if another boot left it open.
pub fn is_full(folder: &Path) -> bool {
    let read = || -> io::Result<bool> {
        let map = ReadMap::read(&folder.join(PRESENT)).map_err(io::Error::other)?;
        let contents = fs::metadata(folder.join(CONTENTS))?;
        let valid = map.header.boot == [0; 16] || map.header.boot == boot_id()?;
        Ok(valid && contents.len() == map.header.length && map.missing_bytes() == 0)
    };
    read().unwrap_or(false)
}

/// Removes a cache that is not in use. Returns the bytes that were freed; `None` if it is in use,
/// or is not a cache.
///
/// # Errors
///
/// If a file can't be opened, locked or removed.
pub fn remove(folder: &Path) -> io::Result<Option<u64>> {
    let contents = match File::open(folder.join(CONTENTS)) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let Some(contents) = Locked::try_exclusive(contents)? else {
        return Ok(None);
    };
    // Locked until both files are gone, so that no process opens one and finds the other missing.
    let _map = match PresenceMap::open(&folder.join(PRESENT)) {
        Ok(map) => Some(map),
        Err(error) if matches!(error.fault, PresenceFault::InUse) => return Ok(None),
        // The contents are useless without a valid map.
        Err(_) => None,
    };
    let bytes = contents.metadata()?.blocks() * 512;
    durable::remove(&folder.join(PRESENT))?;
    fs::remove_file(folder.join(CONTENTS))?;
    // Fails if the folder has other files; those stay.
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

/// The contents file, or a new one in its place if a snapshot's root file system is a hard link to
/// it: the snapshot still needs those bytes. Locked exclusively.
fn exclusive_contents(
    folder: &Path,
    contents: File,
    of_another_boot: bool,
) -> Result<File, CacheError> {
    let failed = |error| CacheError::Io(folder.to_owned(), error);
    let linked = contents.metadata().map_err(failed)?.nlink() > 1;
    // If the map is of another boot, only a VM of the snapshot can have the file open.
    let of_a_snapshot = linked && of_another_boot;
    if !try_lock_exclusive(&contents).map_err(failed)? && !of_a_snapshot {
        return Err(CacheError::OtherImage(folder.to_owned()));
    }
    if !linked {
        return Ok(contents);
    }
    flock(&contents, FlockOperation::Unlock).map_err(|error| failed(error.into()))?;
    fs::remove_file(folder.join(CONTENTS)).map_err(failed)?;
    let contents = open_contents(folder).map_err(failed)?;
    match try_lock_exclusive(&contents).map_err(failed)? {
        true => Ok(contents),
        false => Err(CacheError::InUse(folder.to_owned())),
    }
}

/// Resets the map: only zero chunks are present. The file must be locked exclusively.
fn reset_map(
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
    // VMs take a shared lock.
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
        // All zeros mean "any boot" in a map.
        [0, ..] if id == [0; 16] => Err(io::Error::other("the host has no boot id")),
        id => Ok(id),
    }
}

/// The id of the image that a cache is of, for messages.
///
/// # Errors
///
/// If the map can't be opened or read, or is not valid.
pub fn image_of(folder: &Path) -> io::Result<ImageId> {
    let file = File::open(folder.join(PRESENT))?;
    let mut head = [0; MAP_HEADER];
    file.read_exact_at(&mut head, 0)?;
    let head = MapHeader::decode(&head, file.metadata()?.len()).map_err(io::Error::other)?;
    Ok(ImageId(head.image))
}
