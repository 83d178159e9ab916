//! Reserves disk room for what is pulled from registries.
//!
//! Only pulls reserve room. The size of a capture is not known in advance: it is compressed and
//! shares what was written before, and disks are sparse and cloned. Captures are written until
//! the disk is full; then they fail and are removed.

use crate::error::{Error, Result};
use jiffy_registry::Descriptor;
use jiffy_sys::mutex::lock;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex, Weak};

/// Tells how many bytes of a blob are written.
pub trait Written: std::fmt::Debug + Send + Sync {
    /// Bytes of the blob of this digest.
    fn written(&self, digest: &str) -> u64;
}

/// Room that pulls have reserved and not used yet. What they have written is counted by the file
/// system.
#[derive(Debug, Default)]
pub struct Room {
    pulls: Mutex<Vec<Weak<Reserved>>>,
}

/// The reservation of one pull; dropping it gives the room back.
#[derive(Debug)]
pub struct Reserved {
    /// Device number of the file system.
    device: u64,
    /// What is fetched: digests and bytes of the blobs.
    blobs: Vec<(String, u64)>,
    /// Bytes of what is made from the blobs.
    more: u64,
    job: Arc<dyn Written>,
}

impl Reserved {
    /// Bytes that are not written yet.
    fn left(&self) -> u64 {
        let left = self.blobs.iter().map(|(digest, bytes)| {
            let done = self.job.written(digest);
            bytes.saturating_sub(done)
        });
        left.fold(self.more, u64::saturating_add)
    }
}

impl Room {
    /// Reserves room on the file system of this path for the blobs of a pull and for `more`
    /// bytes, or refuses before anything is fetched: blocking. Writers other than pulls may still
    /// fill the disk.
    pub fn reserve<'a>(
        &self,
        path: &Path,
        blobs: impl Iterator<Item = &'a Descriptor>,
        more: u64,
        job: Arc<dyn Written>,
    ) -> Result<Arc<Reserved>> {
        let device = nearest_existing(path)
            .metadata()
            .map_err(|error| Error::io("determine the free space", path, &error))?
            .dev();
        let reserved = Arc::new(Reserved {
            device,
            blobs: blobs
                .map(|blob| (blob.digest.to_string(), blob.size))
                .collect(),
            more,
            job,
        });
        let mut pulls = lock(&self.pulls);
        pulls.retain(|pull| pull.strong_count() > 0);
        // Read before statvfs: bytes written in between are counted twice rather than not at all.
        let others = pulls
            .iter()
            .filter_map(Weak::upgrade)
            .filter(|pull| pull.device == device)
            .fold(0, |sum: u64, pull| sum.saturating_add(pull.left()));
        check_beside(path, reserved.left(), others)?;
        pulls.push(Arc::downgrade(&reserved));
        Ok(reserved)
    }
}

/// As [`Room::reserve`], for a small amount that is written at once.
pub fn check(path: &Path, bytes: u64) -> Result<()> {
    check_beside(path, bytes, 0)
}

fn check_beside(path: &Path, bytes: u64, others: u64) -> Result<()> {
    let there = nearest_existing(path);
    let space = rustix::fs::statvfs(there)
        .map_err(|error| Error::io("determine the free space", path, &error.into()))?;
    let free = space.f_bavail.saturating_mul(space.f_frsize);
    if bytes.saturating_add(others) <= free {
        return Ok(());
    }
    let others = match others.div_ceil(1 << 20) {
        0 => String::new(),
        mib => format!(", of which other pulls will take {mib} MiB"),
    };
    Err(Error::no_room(format!(
        "The pull needs at least {} MiB, and {} has {} MiB left{others}.",
        bytes.div_ceil(1 << 20),
        there.display(),
        free >> 20
    ))
    .hint("Free some space: `jiffy image prune` removes images that can be pulled again."))
}

/// This path, or its nearest ancestor that exists, to call statvfs on.
fn nearest_existing(path: &Path) -> &Path {
    let existing = path.ancestors().find(|folder| folder.exists());
    existing.unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_registry::Digest;
    use jiffy_wire::api::ErrorKind;
    use std::sync::atomic::{AtomicU64, Ordering};

    #[derive(Debug, Default)]
    struct Done(AtomicU64);

    impl Written for Done {
        fn written(&self, _digest: &str) -> u64 {
            self.0.load(Ordering::Relaxed)
        }
    }

    #[test]
    fn a_pull_that_cannot_fit_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("not/there/yet");
        check(&path, 1).unwrap();
        for bytes in [1 << 60, u64::MAX] {
            let refused = check(&path, bytes).unwrap_err();
            assert_eq!(refused.0.kind, ErrorKind::NoRoom);
        }
    }

    #[test]
    fn two_pulls_never_reserve_the_same_disk_space() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("not/there/yet");
        let space = rustix::fs::statvfs(folder.path()).unwrap();
        let free = space.f_bavail * space.f_frsize;
        // Other programs write to this disk, too: a quarter is left as a margin.
        let blob = Descriptor::new("", Digest::of(b"large"), free - free / 4);
        let room = Room::default();
        let (first, second) = (Arc::<Done>::default(), Arc::<Done>::default());
        let fetched = room.reserve(&path, [&blob].into_iter(), 0, first.clone());
        let fetched = fetched.unwrap();
        let want = || room.reserve(&path, [].into_iter(), free / 2, second.clone());
        let refused = want().unwrap_err().0;
        assert_eq!(refused.kind, ErrorKind::NoRoom);
        assert!(
            refused.message.contains("other pulls"),
            "{}",
            refused.message
        );
        // Fetched bytes are counted by the file system; this test writes none.
        first.0.store(blob.size, Ordering::Relaxed);
        drop(want().unwrap());
        first.0.store(0, Ordering::Relaxed);
        want().unwrap_err();
        drop(fetched);
        want().unwrap();
    }
}
