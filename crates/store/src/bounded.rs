//! Caches that are kept small: what was not used for longest goes first, and
//! what is in use stays.

use crate::disk_cache;
use crate::partial::{self, map_path};
use jiffy_wire::disk::{CONTENTS, PRESENT};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// What may be given up: it can be had again.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cached {
    /// The folder of a [`disk_cache`]: it is removed.
    Disk(PathBuf),
    /// The file of a partial image, of which there must be an origin: its
    /// chunks are dropped, and it stays.
    Image(PathBuf),
}

/// What was given up.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Kept {
    /// Bytes on the disk before.
    pub before: u64,
    /// Bytes on the disk now.
    pub after: u64,
    /// What gave way, the longest unused first.
    pub dropped: Vec<Cached>,
}

impl Cached {
    /// Bytes it takes on the disk, and when it was used last; `None` if it is
    /// not there, or is an image that is whole.
    fn usage(&self) -> Option<(u64, SystemTime)> {
        let (bytes, map) = match self {
            Cached::Disk(folder) => (folder.join(CONTENTS), folder.join(PRESENT)),
            Cached::Image(path) => (path.clone(), map_path(path)),
        };
        let used = fs::metadata(map).ok()?.modified().ok()?;
        Some((fs::metadata(bytes).ok()?.blocks() * 512, used))
    }

    /// Gives it up, unless it is in use.
    fn give_up(&self) -> io::Result<Option<u64>> {
        match self {
            Cached::Disk(folder) => disk_cache::remove(folder),
            Cached::Image(path) => partial::shrink(path),
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        match self {
            Cached::Disk(path) | Cached::Image(path) => path,
        }
    }
}

/// Gives up caches until all together take no more than `limit` bytes, or only
/// those are left that are in use. One that cannot be given up is left as it
/// is; its error comes back when the others are done.
pub fn keep_within(limit: u64, caches: &[Cached]) -> io::Result<Kept> {
    let mut known: Vec<(SystemTime, u64, &Cached)> = caches
        .iter()
        .filter_map(|cache| {
            let (bytes, used) = cache.usage()?;
            Some((used, bytes, cache))
        })
        .collect();
    known.sort();
    let before: u64 = known.iter().map(|(_, bytes, _)| bytes).sum();
    let mut kept = Kept {
        before,
        after: before,
        dropped: Vec::new(),
    };
    let mut problem = None;
    for (_, bytes, cache) in known {
        if kept.after <= limit {
            break;
        }
        match cache.give_up() {
            Ok(Some(freed)) => {
                kept.after -= freed.min(bytes);
                kept.dropped.push(cache.clone());
            }
            Ok(None) => {}
            Err(error) => problem = Some(error),
        }
    }
    match problem {
        Some(error) if kept.after > limit => Err(error),
        _ => Ok(kept),
    }
}
