//! Drops parts of a disk cache.

use super::{TRIM_LOCK, boot_id, remove};
use crate::presence::{PresenceFault, PresenceMap};
use crate::sparse::SparseFile;
use jiffy_sys::locked::Locked;
use jiffy_sys::mutex::write;
use jiffy_wire::disk::{CONTENTS, PRESENT};
use rustix::fs::{SeekFrom, seek};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use std::fs::{self, File, OpenOptions};
use std::io::{self, IoSliceMut};
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Bytes that are dropped or kept together.
const RANGE: u64 = 256 << 10;
/// Bytes of a page of the page cache.
const PAGE: u64 = 4096;

/// Which parts may be dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parts {
    /// Those that the host's page cache does not hold any more: they were not read for some time.
    Cold,
    /// All.
    Any,
}

/// Drops about `bytes` bytes of a cache that is not in use, and none of the chunks in `keep`.
/// Returns the bytes that were freed; `None` if the cache is in use, is not a cache, or shares its
/// bytes with a snapshot.
///
/// No process may have the cache open meanwhile, because a VMM does not check a bit again after it
/// has seen it set. VMMs hold a shared lock on the file as long as they live, so an exclusive lock
/// is enough.
///
/// # Errors
///
/// If the cache's files can't be opened, locked, read or removed, or the bytes can't be dropped.
pub fn trim(folder: &Path, parts: Parts, bytes: u64, keep: &[u32]) -> io::Result<Option<u64>> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(folder.join(CONTENTS));
    let contents = match file {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    // A snapshot's root file system is a hard link to the same file.
    let contents = match Locked::try_exclusive(contents)? {
        Some(contents) if contents.metadata()?.nlink() == 1 => contents,
        _ => return Ok(None),
    };
    let map = match PresenceMap::open(&folder.join(PRESENT)) {
        Ok(map) => map,
        Err(error) => {
            return match error.fault {
                PresenceFault::InUse => Ok(None),
                PresenceFault::Io(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                // A missing or damaged map: the contents are useless without it.
                _ => {
                    drop(contents);
                    remove(folder)
                }
            };
        }
    };
    let head = *map.header();
    let length = contents.metadata()?.len();
    if head.length != length || (head.boot != [0; 16] && head.boot != boot_id()?) {
        drop((map, contents));
        return remove(folder);
    }
    let unit = u64::from(head.unit);
    let kept: Vec<Range<u64>> = keep
        .iter()
        .map(|chunk| u64::from(*chunk) * unit..(u64::from(*chunk) + 1) * unit)
        .collect();
    let sparse = SparseFile::<()>::new(contents, map, 0..length);
    let contents = sparse.file();
    let mut chosen: Vec<Range<u64>> = Vec::new();
    let mut sum = 0;
    let mut at = 0;
    while sum < bytes
        && let Some(data) = next_data(contents, at)?
    {
        // Whole units only: a bit stands for a whole unit.
        let size = RANGE.max(unit);
        let start = data.start / size * size;
        at = (start + size).min(length);
        let range = start..at;
        let needed = kept
            .iter()
            .any(|kept| kept.start < range.end && range.start < kept.end);
        if !needed && (parts == Parts::Any || !is_cached(contents, &range)?) {
            sum += range.end.min(data.end.max(range.start)) - data.start.max(range.start);
            chosen.push(range);
        }
        if at >= length {
            break;
        }
    }
    if chosen.is_empty() {
        return Ok(Some(0));
    }
    let units: Vec<Range<u64>> = chosen.iter().map(|range| sparse.units_of(range)).collect();
    sparse.drop_units(&units, true).map(Some)
}

/// Drops about `bytes` bytes of the unused caches in the same folder, in the folder's order, of each
/// first what was not read lately, and returns the bytes that were freed. Caches that cannot be
/// trimmed are skipped. No cache of this process is opened meanwhile.
pub fn trim_others(folder: &Path, bytes: u64) -> u64 {
    let _alone = write(&TRIM_LOCK);
    let beside = folder.parent().map(fs::read_dir);
    let others: Vec<PathBuf> = beside
        .into_iter()
        .flatten()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path != folder)
        .collect();
    let mut freed = 0;
    for parts in [Parts::Cold, Parts::Any] {
        for other in &others {
            if freed < bytes {
                let given = trim(other, parts, bytes - freed, &[]);
                freed += given.ok().flatten().unwrap_or(0);
            }
        }
    }
    freed
}

/// The next range that is not a hole.
fn next_data(file: &File, at: u64) -> io::Result<Option<Range<u64>>> {
    let start = match seek(file, SeekFrom::Data(at)) {
        Ok(start) => start,
        Err(Errno::NXIO) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let end = seek(file, SeekFrom::Hole(start))?;
    Ok(Some(start..end))
}

/// Whether the host's page cache holds any of these bytes. False if the file system or kernel can't
/// tell (a tmpfs, an old kernel).
fn is_cached(file: &File, bytes: &Range<u64>) -> io::Result<bool> {
    for page in (bytes.start..bytes.end).step_by(PAGE as usize) {
        let mut byte = [0];
        let mut into = [IoSliceMut::new(&mut byte)];
        match preadv2(file, &mut into, page, ReadWriteFlags::NOWAIT) {
            Ok(0) => break,
            Ok(_) => {
                // Reading a hole succeeds although no page of it is cached.
                if next_data(file, page)?.is_some_and(|data| data.start < page + PAGE) {
                    return Ok(true);
                }
            }
            Err(Errno::AGAIN) => {}
            Err(Errno::OPNOTSUPP | Errno::INVAL) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(false)
}
