//! BLAKE3 digests of files, each computed once while the file's inode, size and times stay the
//! same.

use jiffy_sys::mutex::lock;
use jiffy_sys::stamp::Stamp;
use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

/// A digest that was saved, and the file and stamp it belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Known {
    /// The file.
    pub path: PathBuf,
    /// The file's stamp when the digest was computed.
    pub stamp: Stamp,
    /// BLAKE3, hexadecimal.
    pub digest: String,
}

/// The digests of a node's files.
#[derive(Debug, Default)]
pub struct Digests {
    known: Mutex<HashMap<PathBuf, (Stamp, String)>>,
}

impl Digests {
    /// The digest of a file, if it is known; one look at the file's metadata.
    pub fn known(&self, path: &Path) -> Option<String> {
        let now = Stamp::of(&fs::metadata(path).ok()?);
        let known = self.lock();
        let (stamp, digest) = known.get(path)?;
        (*stamp == now).then(|| digest.clone())
    }

    /// The digest of a file, which is read if it has to be: blocking.
    ///
    /// # Errors
    ///
    /// If the file can't be opened or read, or is not a regular one.
    pub fn of(&self, path: &Path) -> io::Result<String> {
        self.entry(path).map(|known| known.digest)
    }

    /// As [`Digests::of`], with path and stamp, to be saved.
    ///
    /// # Errors
    ///
    /// As for [`Digests::of`].
    pub fn entry(&self, path: &Path) -> io::Result<Known> {
        let file = jiffy_sys::regular::open(path)?;
        let stamp = Stamp::of(&file.metadata()?);
        let known = self.lock().get(path).cloned();
        let digest = match known {
            Some((then, digest)) if then == stamp => digest,
            _ => {
                let mut hasher = blake3::Hasher::new();
                hasher.update_reader(file)?;
                let digest = hasher.finalize().to_hex().to_string();
                self.lock().insert(path.to_owned(), (stamp, digest.clone()));
                digest
            }
        };
        Ok(Known {
            path: path.to_owned(),
            stamp,
            digest,
        })
    }

    /// Takes over saved digests; each is used only while its file's stamp matches.
    pub fn remember(&self, known: &[Known]) {
        let mut all = self.lock();
        for known in known {
            all.insert(known.path.clone(), (known.stamp, known.digest.clone()));
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<PathBuf, (Stamp, String)>> {
        lock(&self.known)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cached_digest_is_valid_only_for_the_same_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "one").unwrap();
        let digests = Digests::default();
        assert_eq!(digests.known(&path), None);
        let one = digests.entry(&path).unwrap();
        assert_eq!(one.digest, blake3::hash(b"one").to_hex().to_string());
        assert_eq!(digests.known(&path), Some(one.digest.clone()));
        let next = folder.path().join("next");
        fs::write(&next, "two").unwrap();
        fs::rename(&next, &path).unwrap();
        assert_eq!(digests.known(&path), None);
        let later = Digests::default();
        later.remember(std::slice::from_ref(&one));
        assert_eq!(later.known(&path), None, "it is another file by now");
        assert_ne!(later.of(&path).unwrap(), one.digest);
    }
}
