//! Keeps the caches of a node within a limit; caches in use are never evicted. The order is by the
//! cost of getting the data again: first chunks of partial images whose disk caches hold them
//! unpacked, then parts of disks that were not read lately, then everything that a boot does not
//! need, then whole disks. Among equals, the least recently used goes first.

use crate::disk_cache::{self, Parts};
use crate::partial::{self, map_path};
use jiffy_wire::disk::{CONTENTS, PRESENT};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// A cache that may be evicted, because its contents can be fetched again.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cached {
    /// A [`disk_cache`]: parts of it or all of it are dropped.
    Disk {
        /// Its folder.
        folder: PathBuf,
        /// Chunks that a boot needs: they are only dropped together with the whole disk.
        keep: Vec<u32>,
    },
    /// The file of a partial image that has an origin: its chunks are dropped, the file stays.
    Image(PathBuf),
}

/// The result of [`evict_to_limit`] and [`evict_one`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Eviction {
    /// Bytes on the disk before.
    pub before: u64,
    /// Bytes on the disk now.
    pub after: u64,
    /// Caches that were dropped, wholly or in part, in this order.
    pub dropped: Vec<PathBuf>,
}

/// The part of a cache that is dropped.
#[derive(Clone, Copy, PartialEq, Eq)]
enum EvictStep {
    Image,
    Cold,
    NotForBoot,
    Disk,
}

impl Cached {
    /// Bytes it takes on the disk, and when it was last used; `None` if it does not exist, is a
    /// complete image, or is a disk whose bytes a snapshot shares.
    fn usage(&self) -> Option<(u64, SystemTime)> {
        let (bytes, map) = match self {
            Cached::Disk { folder, .. } => (folder.join(CONTENTS), folder.join(PRESENT)),
            Cached::Image(path) => (path.clone(), map_path(path)),
        };
        let used = fs::metadata(map).ok()?.modified().ok()?;
        let bytes = fs::metadata(bytes).ok()?;
        (bytes.nlink() == 1).then(|| (bytes.blocks() * 512, used))
    }

    /// Drops about `bytes` bytes in this way, unless the cache is in use.
    fn evict(&self, step: EvictStep, bytes: u64) -> io::Result<Option<u64>> {
        match (self, step) {
            (Cached::Image(path), EvictStep::Image) => partial::shrink(path),
            (Cached::Disk { folder, keep }, EvictStep::Cold) => {
                disk_cache::trim(folder, Parts::Cold, bytes, keep)
            }
            (Cached::Disk { folder, keep }, EvictStep::NotForBoot) => {
                disk_cache::trim(folder, Parts::Any, bytes, keep)
            }
            (Cached::Disk { folder, .. }, EvictStep::Disk) => disk_cache::remove(folder),
            _ => Ok(None),
        }
    }

    /// The path of the cache.
    pub fn path(&self) -> &Path {
        match self {
            Cached::Disk { folder: path, .. } | Cached::Image(path) => path,
        }
    }
}

/// Bytes that all of these caches take on the disk and could give back.
pub fn usage(caches: &[Cached]) -> u64 {
    let known = caches.iter().filter_map(Cached::usage);
    known.map(|(bytes, _)| bytes).sum()
}

/// Evicts caches until together they take at most `limit` bytes, or only caches in use are left. A
/// cache that cannot be evicted is skipped.
///
/// # Errors
///
/// If the caches still take more than `limit` bytes after all were tried: the last error of one
/// that could not be evicted.
pub fn evict_to_limit(limit: u64, caches: &[Cached]) -> io::Result<Eviction> {
    evict(limit, caches, usize::MAX)
}

/// Like [`evict_to_limit`], but ends when it has dropped something of one cache, which takes a short
/// time.
///
/// # Errors
///
/// If nothing was dropped because caches could not be evicted: the last error.
pub fn evict_one(limit: u64, caches: &[Cached]) -> io::Result<Eviction> {
    evict(limit, caches, 1)
}

fn evict(limit: u64, caches: &[Cached], most: usize) -> io::Result<Eviction> {
    let mut known: Vec<(SystemTime, &Cached)> = caches
        .iter()
        .filter_map(|cache| Some((cache.usage()?.1, cache)))
        .collect();
    known.sort();
    let before = usage(caches);
    let mut eviction = Eviction {
        before,
        after: before,
        dropped: Vec::new(),
    };
    let mut problem = None;
    for step in [
        EvictStep::Image,
        EvictStep::Cold,
        EvictStep::NotForBoot,
        EvictStep::Disk,
    ] {
        for (_, cache) in &known {
            let over = eviction.after.saturating_sub(limit);
            if over == 0 || eviction.dropped.len() >= most {
                return Ok(eviction);
            }
            match cache.evict(step, over) {
                Ok(Some(freed)) if freed > 0 => {
                    eviction.after = eviction.after.saturating_sub(freed);
                    eviction.dropped.push(cache.path().to_owned());
                }
                Ok(_) => {}
                Err(error) => problem = Some(error),
            }
        }
    }
    match problem {
        Some(error) if eviction.after > limit => Err(error),
        _ => Ok(eviction),
    }
}
