//! [`BlobFolder`]: blobs on disk, each fetched once even if several callers ask.
//!
//! ```text
//! blobs/sha256/HEX   whole blobs; their bytes have this SHA-256
//! partial/HEX        beginnings of blobs; locked (flock) while being fetched
//! lock               locked shared while the folder is used, exclusive for removals
//! ```
//!
//! A blob is renamed to its final name once it is whole, verified and synced. What a killed process
//! left in `partial` is continued by the next one.

use crate::error::Result;
use crate::lock::{is_at, open_locked};
use crate::{Client, Descriptor, Digest, Progress, Reference, RegistryError, parallel};
use jiffy_sys::locked::{self, Locked};
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// A folder of blobs named by their digests, `blobs/sha256/HEX`, as in an OCI layout.
/// Any number of threads and processes may use one at once.
#[derive(Clone, Debug)]
pub struct BlobFolder {
    root: PathBuf,
}

/// A lock: while it exists, [`BlobFolder::remove_unused`] removes nothing.
#[derive(Debug)]
pub struct Hold {
    _lock: Locked,
}

/// What [`BlobFolder::remove_unused`] removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// Files, unfinished ones included.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl BlobFolder {
    /// Opens or creates the folder, accessible to its user only, because images may be private.
    ///
    /// # Errors
    ///
    /// If a folder can't be created.
    pub fn open(root: impl Into<PathBuf>) -> Result<Self> {
        let folder = Self { root: root.into() };
        for path in [folder.blobs(), folder.partials()] {
            DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(&path)
                .map_err(|error| RegistryError::file("create", path, error))?;
        }
        Ok(folder)
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Path of a blob, whether it is present or not.
    pub fn path(&self, digest: &Digest) -> PathBuf {
        self.blobs().join(digest.hex())
    }

    /// The blob's path if the whole blob is present.
    pub fn get(&self, blob: &Descriptor) -> Option<PathBuf> {
        let path = self.path(&blob.digest);
        let there = fs::symlink_metadata(&path).ok()?;
        (there.is_file() && there.len() == blob.size).then_some(path)
    }

    /// Fetches a blob unless it is present, and returns its path. Continues an interrupted fetch.
    /// If another thread or process fetches the same blob, waits for it, and fetches the blob
    /// itself if the other fails.
    ///
    /// # Errors
    ///
    /// If the registry can't be reached, refuses, or gives other bytes; if `progress` is cancelled;
    /// or if a file can't be locked, written or renamed.
    pub fn fetch(
        &self,
        client: &Client,
        repository: &Reference,
        blob: &Descriptor,
        progress: &dyn Progress,
    ) -> Result<PathBuf> {
        let _hold = self.hold()?;
        let path = self.path(&blob.digest);
        let partial = self.partials().join(blob.digest.hex());
        let what = format!("blob {}", blob.digest.short());
        let there = || self.get(blob).is_some();
        let Some(mut file) = open_locked(&partial, &what, progress, &there)? else {
            progress.moved(blob, blob.size);
            return Ok(path);
        };
        match client.blob_to_file(repository, blob, &mut file, progress) {
            Ok(()) => {}
            Err(RegistryError::Sink { source, .. }) => {
                return Err(RegistryError::file("write", partial, source));
            }
            Err(error) => {
                // Damaged bytes must not be continued by the next fetch.
                if matches!(error, RegistryError::Damaged { .. }) {
                    let _ = fs::remove_file(&partial);
                }
                return Err(error);
            }
        }
        publish(&file, &partial, &path)
            .map_err(|error| RegistryError::file("write", &path, error))?;
        Ok(path)
    }

    /// Fetches several blobs, a few at a time.
    ///
    /// # Errors
    ///
    /// As for [`fetch`](Self::fetch): the first error of a blob.
    pub fn fetch_all(
        &self,
        client: &Client,
        repository: &Reference,
        blobs: &[Descriptor],
        progress: &dyn Progress,
    ) -> Result<()> {
        let _hold = self.hold()?;
        parallel::for_each(blobs, |blob| {
            self.fetch(client, repository, blob, progress).map(drop)
        })
    }

    /// Stores bytes that need no fetch, such as a manifest.
    ///
    /// # Errors
    ///
    /// If the file can't be locked, written or renamed.
    pub fn put(&self, bytes: &[u8]) -> Result<Digest> {
        let _hold = self.hold()?;
        let digest = Digest::of(bytes);
        let path = self.path(&digest);
        let partial = self.partials().join(digest.hex());
        let blob = Descriptor::new("", digest, bytes.len() as u64);
        let there = || self.get(&blob).is_some();
        if let Some(mut file) = open_locked(&partial, "blob", &(), &there)? {
            file.set_len(0)
                .and_then(|()| file.write_all(bytes))
                .and_then(|()| publish(&file, &partial, &path))
                .map_err(|error| RegistryError::file("write", &path, error))?;
        }
        Ok(digest)
    }

    /// Prevents [`remove_unused`](Self::remove_unused), from before the first blob is fetched until
    /// a record says that the blobs are used. Waits while blobs are being removed.
    ///
    /// # Errors
    ///
    /// If the lock's file can't be opened or locked.
    pub fn hold(&self) -> Result<Hold> {
        let (path, lock) = self.lock()?;
        let lock =
            Locked::shared(lock).map_err(|error| RegistryError::file("lock", path, error))?;
        Ok(Hold { _lock: lock })
    }

    /// Removes blobs for which `keep` returns false, and what unfinished fetches left. `None` if
    /// the folder is [held](Self::hold): nothing was removed, try again later.
    ///
    /// # Errors
    ///
    /// If the lock's file can't be opened or locked, or a folder can't be read, or a file removed.
    pub fn remove_unused(&self, keep: &dyn Fn(&Digest) -> bool) -> Result<Option<Removed>> {
        let (path, lock) = self.lock()?;
        let lock = Locked::try_exclusive(lock)
            .map_err(|error| RegistryError::file("lock", path, error))?;
        let Some(_alone) = lock else {
            return Ok(None);
        };
        let mut removed = Removed::default();
        let kept = |name: &str| {
            let digest = format!("sha256:{name}").parse();
            // Files with other names were not made by this module, and are kept.
            digest.map_or(true, |digest| keep(&digest))
        };
        remove_in(&self.blobs(), &kept, &mut removed)?;
        // All partial files: a process that fetches one would hold the folder.
        remove_in(&self.partials(), &|_| false, &mut removed)?;
        Ok(Some(removed))
    }

    fn lock(&self) -> Result<(PathBuf, File)> {
        let path = self.root.join("lock");
        let lock =
            locked::open(&path).map_err(|error| RegistryError::file("open", &path, error))?;
        Ok((path, lock))
    }

    fn blobs(&self) -> PathBuf {
        self.root.join("blobs/sha256")
    }

    fn partials(&self) -> PathBuf {
        self.root.join("partial")
    }
}

/// Renames a complete file, which we have locked, to its final name.
pub(crate) fn publish(file: &File, partial: &Path, path: &Path) -> io::Result<()> {
    file.sync_all()?;
    if !is_at(file, partial) {
        return Err(io::Error::new(
            io::ErrorKind::NotFound,
            "the unfinished file was removed or replaced",
        ));
    }
    fs::rename(partial, path)?;
    jiffy_sys::durable::sync_folder_of(path)
}

fn remove_in(folder: &Path, keep: &dyn Fn(&str) -> bool, removed: &mut Removed) -> Result<()> {
    let failed = |error| RegistryError::file("remove files in", folder, error);
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let metadata = entry.metadata().map_err(failed)?;
        let keeps = entry.file_name().to_str().is_none_or(keep);
        if keeps || !metadata.is_file() {
            continue;
        }
        fs::remove_file(entry.path()).map_err(failed)?;
        removed.files += 1;
        removed.bytes += metadata.len();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unused_blobs_are_removed_unless_the_folder_is_held() {
        let root = tempfile::tempdir().unwrap();
        let folder = BlobFolder::open(root.path().join("a/b")).unwrap();
        let kept = folder.put(b"kept").unwrap();
        let gone = folder.put(b"unused").unwrap();
        assert_eq!(folder.put(b"kept").unwrap(), kept);
        assert_eq!(fs::read(folder.path(&gone)).unwrap(), b"unused");
        fs::write(folder.partials().join(kept.hex()), b"ke").unwrap();
        fs::write(folder.blobs().join("not-a-digest"), b"x").unwrap();

        let hold = folder.hold().unwrap();
        let also = BlobFolder::open(folder.root()).unwrap();
        let _second = also.hold().unwrap();
        assert_eq!(folder.remove_unused(&|_| false).unwrap(), None);
        drop(hold);
        assert_eq!(folder.remove_unused(&|_| false).unwrap(), None);
        drop(_second);

        let removed = folder.remove_unused(&|digest| *digest == kept).unwrap();
        assert_eq!(removed, Some(Removed { files: 2, bytes: 8 }));
        assert!(folder.get(&Descriptor::of("", b"kept")).is_some());
        assert!(folder.get(&Descriptor::of("", b"unused")).is_none());
        assert!(folder.blobs().join("not-a-digest").exists());
    }

    #[test]
    fn a_blob_of_the_wrong_length_counts_as_missing() {
        let root = tempfile::tempdir().unwrap();
        let folder = BlobFolder::open(root.path()).unwrap();
        let digest = folder.put(b"whole").unwrap();
        fs::write(folder.path(&digest), b"who").unwrap();
        assert!(folder.get(&Descriptor::of("", b"whole")).is_none());
        folder.put(b"whole").unwrap();
        assert!(folder.get(&Descriptor::of("", b"whole")).is_some());
    }
}
