//! Reserves disk room for what is about to be written, in one ledger.
//!
//! | writer | reserves |
//! |---|---|
//! | pull | what is still to be fetched, and for the image as much as its layers; a snapshot's disks unpacked, without zero chunks |
//! | capture whose RAM is written whole (hibernation, golden snapshot, first snapshot) | the parts of RAM that are no holes |
//! | commit | the size of the changes that the guest sent |
//! | copy of an image as a root disk, without clones | the image's size |
//! | capture or commit of a VM whose root file system is incomplete | its missing chunks |
//! | optimised snapshot of which parts are in a registry | the missing parts |
//! | optimised snapshot | the size of its RAM's images |
//! | push that cuts an image or a disk into chunks | its size |
//!
//! Compression and shared blocks only make these smaller. Nobody knows beforehand what a capture
//! writes of which an earlier one has most, nor the size of an imported stream; volumes and root
//! layers are sparse. These are written until the disk is full; then they fail and are removed.

use crate::error::{Error, Result};
use jiffy_store::presence::ReadMap;
use jiffy_sys::mutex::lock;
use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

/// Tells how many bytes a writer will still write, at most.
pub trait Unwritten: fmt::Debug + Send + Sync {
    /// Bytes that the file system does not count yet.
    fn unwritten(&self) -> u64;
}

/// The writer reduces it.
impl Unwritten for AtomicU64 {
    fn unwritten(&self) -> u64 {
        self.load(Ordering::Relaxed)
    }
}

/// Files that are filled on demand, by the maps of what is present in them: what is missing will be
/// written. A map that can't be read counts for nothing.
#[derive(Debug)]
pub struct Missing(pub Vec<PathBuf>);

impl Unwritten for Missing {
    fn unwritten(&self) -> u64 {
        let of = |map: &PathBuf| ReadMap::read(map).map_or(0, |map| map.missing_bytes());
        self.0.iter().map(of).sum()
    }
}

/// Room that is reserved and not used yet. What was written is counted by the file system.
#[derive(Debug, Default)]
pub struct Room {
    reserved: Mutex<Vec<Weak<Reserved>>>,
}

/// A reservation; dropping it gives the room back.
#[derive(Debug)]
#[must_use]
pub struct Reserved {
    /// Device number of the file system.
    device: u64,
    unwritten: Arc<dyn Unwritten>,
}

impl Room {
    /// Reserves room on the file system of this path for what is still unwritten: blocking. `what`
    /// begins the refusal, as in "The pull needs at least". Writers that reserve nothing may still
    /// fill the disk.
    ///
    /// # Errors
    ///
    /// If less is free than that and what others have reserved, or `stat` or `statvfs` fails.
    pub fn reserve(
        &self,
        path: &Path,
        what: &str,
        unwritten: Arc<dyn Unwritten>,
    ) -> Result<Arc<Reserved>> {
        let failed = |error| Error::io("determine the free space", path, &error);
        let there = nearest_existing(path);
        let device = there.metadata().map_err(failed)?.dev();
        let bytes = unwritten.unwritten();
        let reserved = Arc::new(Reserved { device, unwritten });
        let mut all = lock(&self.reserved);
        all.retain(|other| other.strong_count() > 0);
        // Read before statvfs: bytes written in between are counted twice rather than not at all.
        let others = all
            .iter()
            .filter_map(Weak::upgrade)
            .filter(|other| other.device == device)
            .fold(0, |sum: u64, other| {
                sum.saturating_add(other.unwritten.unwritten())
            });
        let space = rustix::fs::statvfs(there).map_err(|error| failed(error.into()))?;
        let free = space.f_bavail.saturating_mul(space.f_frsize);
        if bytes.saturating_add(others) > free {
            let others = match others.div_ceil(1 << 20) {
                0 => String::new(),
                mib => format!(", of which {mib} MiB are reserved for other operations"),
            };
            return Err(Error::no_room(format!(
                "{what} {} MiB, and {} has {} MiB left{others}.",
                bytes.div_ceil(1 << 20),
                shown(there).display(),
                free >> 20
            ))
            .hint(
                "Free some space: `jiffy image prune` removes images that can be pulled again.",
            ));
        }
        all.push(Arc::downgrade(&reserved));
        Ok(reserved)
    }

    /// As [`Room::reserve`], for a number of bytes that stays reserved to the end.
    ///
    /// # Errors
    ///
    /// As for [`Room::reserve`].
    pub fn reserve_bytes(&self, path: &Path, what: &str, bytes: u64) -> Result<Arc<Reserved>> {
        self.reserve(path, what, Arc::new(AtomicU64::new(bytes)))
    }
}

/// This path, or its nearest ancestor that exists, to call statvfs on.
fn nearest_existing(path: &Path) -> &Path {
    let existing = path.ancestors().find(|folder| folder.exists());
    existing.unwrap_or(path)
}

/// What users know of this path: the folder that has a draft, whose name begins with a dot.
fn shown(path: &Path) -> &Path {
    let is_draft = |folder: &&Path| {
        let name = folder.file_name().unwrap_or_default();
        name.as_encoded_bytes().starts_with(b".")
    };
    path.ancestors().find(|it| !is_draft(it)).unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_store::presence::PresenceMap;
    use jiffy_wire::api::ErrorKind;
    use jiffy_wire::disk::MapHeader;

    #[test]
    fn drafts_are_not_shown() {
        for (path, known) in [
            ("/data/snapshots/.new-1a", "/data/snapshots"),
            ("/data/snapshots", "/data/snapshots"),
            ("/", "/"),
        ] {
            assert_eq!(shown(Path::new(path)), Path::new(known));
        }
    }

    #[test]
    fn what_cannot_fit_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("not/there/yet");
        let room = Room::default();
        let want = |bytes| room.reserve_bytes(&path, "The pull needs at least", bytes);
        want(1).unwrap();
        for bytes in [1 << 60, u64::MAX] {
            let refused = want(bytes).unwrap_err().0;
            assert_eq!(refused.kind, ErrorKind::NoRoom);
            let said = refused.message;
            assert!(said.starts_with("The pull needs at least 1"), "{said}");
        }
    }

    #[test]
    fn what_is_missing_is_reserved_until_it_is_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("present");
        let (unit, length) = (8 << 10, 1 << 20);
        let header = MapHeader {
            unit,
            length,
            tail: length,
            image: [0; 16],
            boot: [0; 16],
        };
        let map = PresenceMap::create(&path, header).unwrap();
        let missing = Missing(vec![path, folder.path().join("none")]);
        assert_eq!(missing.unwritten(), length);
        map.set(0..3).unwrap();
        map.set(100..128).unwrap();
        assert_eq!(missing.unwritten(), length - 31 * u64::from(unit));
        map.set(0..128).unwrap();
        assert_eq!(missing.unwritten(), 0);
    }

    #[test]
    fn two_writers_never_reserve_the_same_disk_space() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("not/there/yet");
        let space = rustix::fs::statvfs(folder.path()).unwrap();
        let free = space.f_bavail * space.f_frsize;
        let room = Room::default();
        // Other programs write to this disk, too: a quarter is left as a margin.
        let large = free - free / 4;
        let unwritten = Arc::new(AtomicU64::new(large));
        let first = room.reserve(&path, "A", unwritten.clone()).unwrap();
        let want = || room.reserve_bytes(&path, "B needs up to", free / 2);
        let refused = want().unwrap_err().0;
        assert_eq!(refused.kind, ErrorKind::NoRoom);
        let said = refused.message;
        assert!(said.contains("reserved for other operations"), "{said}");
        // Written bytes are counted by the file system; this test writes none.
        unwritten.store(0, Ordering::Relaxed);
        drop(want().unwrap());
        unwritten.store(large, Ordering::Relaxed);
        want().unwrap_err();
        drop(first);
        drop(want().unwrap());
    }
}
