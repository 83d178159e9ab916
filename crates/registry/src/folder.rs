//! [`BlobFolder`]: blobs on disk, fetched once however many ask.

use crate::error::Result;
use crate::{Client, Descriptor, Digest, Progress, Reference};
use std::path::{Path, PathBuf};

/// A folder of blobs named by their digests, `blobs/sha256/HEX`, as in an OCI layout.
/// Any number of processes may use one at once.
#[derive(Clone, Debug)]
pub struct BlobFolder {
    root: PathBuf,
}

/// While it lives, [`BlobFolder::remove_unused`] removes nothing.
#[derive(Debug)]
pub struct Hold(());

/// What [`BlobFolder::remove_unused`] removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// Files, unfinished ones included.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl BlobFolder {
    /// Opens or creates the folder.
    pub fn open(root: impl Into<PathBuf>) -> Result<Self> {
        Ok(Self { root: root.into() })
    }

    /// Where a blob is or would be.
    pub fn path(&self, digest: &Digest) -> PathBuf {
        self.root.join("blobs/sha256").join(digest.hex())
    }

    /// The blob's path if it is there, whole.
    pub fn get(&self, _blob: &Descriptor) -> Option<PathBuf> {
        unimplemented!()
    }

    /// Fetches a blob unless it is there, and says where it is. Takes up what an
    /// earlier try left. When another thread or process fetches the same blob, waits
    /// for it.
    pub fn fetch(
        &self,
        _client: &Client,
        _repository: &Reference,
        _blob: &Descriptor,
        _progress: &dyn Progress,
    ) -> Result<PathBuf> {
        unimplemented!()
    }

    /// Fetches several blobs, a few at a time.
    pub fn fetch_all(
        &self,
        _client: &Client,
        _repository: &Reference,
        _blobs: &[Descriptor],
        _progress: &dyn Progress,
    ) -> Result<()> {
        unimplemented!()
    }

    /// Puts bytes in that are here already: a manifest.
    pub fn put(&self, _bytes: &[u8]) -> Result<Digest> {
        unimplemented!()
    }

    /// Keeps [`remove_unused`](Self::remove_unused) away, from before the first blob is
    /// fetched until a record says that they are used.
    pub fn hold(&self) -> Result<Hold> {
        unimplemented!()
    }

    /// Removes blobs that `keep` does not want and what unfinished fetches left. `None`
    /// if somebody [holds](Self::hold) the folder: nothing was removed, try again later.
    pub fn remove_unused(&self, _keep: &dyn Fn(&Digest) -> bool) -> Result<Option<Removed>> {
        unimplemented!()
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        &self.root
    }
}
