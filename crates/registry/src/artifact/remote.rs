//! An artifact in a registry, its files read in ranges or fetched whole.

use super::Pack;
use crate::client::Fetched;
use crate::error::Result;
use crate::{Client, Progress, Reference};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// An artifact in a registry: its manifest and configuration are here, its files
/// there.
#[derive(Clone, Debug)]
pub struct RemoteArtifact {
    reference: Reference,
    fetched: Fetched,
    artifact_type: String,
    config: Vec<u8>,
    annotations: BTreeMap<String, String>,
    files: Vec<RemoteFile>,
}

/// A file of an artifact. Cheap to clone; any thread may read.
#[derive(Clone, Debug)]
pub struct RemoteFile {
    #[allow(dead_code)]
    client: Client,
    #[allow(dead_code)]
    repository: Reference,
    name: String,
    size: u64,
    packs: Vec<Pack>,
}

impl RemoteArtifact {
    /// Fetches manifest and configuration. Refuses what is not an artifact of Jiffy, or
    /// whose packs leave gaps, overlap or have bad names.
    pub fn open(
        _client: &Client,
        _reference: &Reference,
        _progress: &dyn Progress,
    ) -> Result<Self> {
        unimplemented!()
    }

    /// Where it is, pinned to its digest.
    pub fn reference(&self) -> &Reference {
        &self.reference
    }

    /// Its manifest.
    pub fn manifest(&self) -> &Fetched {
        &self.fetched
    }

    /// [`IMAGE_TYPE`](super::IMAGE_TYPE) or [`SNAPSHOT_TYPE`](super::SNAPSHOT_TYPE).
    pub fn artifact_type(&self) -> &str {
        &self.artifact_type
    }

    /// The configuration's bytes.
    pub fn config(&self) -> &[u8] {
        &self.config
    }

    /// What else is known of it.
    pub fn annotations(&self) -> &BTreeMap<String, String> {
        &self.annotations
    }

    /// Its files, in the order of the manifest.
    pub fn files(&self) -> &[RemoteFile] {
        &self.files
    }

    /// The file of this name.
    pub fn file(&self, name: &str) -> Option<&RemoteFile> {
        self.files.iter().find(|file| file.name == name)
    }

    /// Fetches all files into a folder, which must exist; each appears whole under its
    /// name or not at all.
    pub fn fetch_all(&self, _folder: &Path, _progress: &dyn Progress) -> Result<()> {
        unimplemented!()
    }
}

impl RemoteFile {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Its packs, in order and without gaps.
    pub fn packs(&self) -> &[Pack] {
        &self.packs
    }

    /// The bytes of the packs with this role, if they follow one another.
    pub fn range_of(&self, _role: &str) -> Option<Range<u64>> {
        unimplemented!()
    }

    /// Some bytes of the file, across packs. Packs that are wholly in the range are
    /// verified by their SHA-256; parts of packs **are not**: the caller must have a
    /// checksum of its own.
    pub fn read(&self, _range: Range<u64>, _progress: &dyn Progress) -> Result<Vec<u8>> {
        unimplemented!()
    }

    /// Fetches the file into `folder` under its name, and says where it is. Verified,
    /// synced, renamed; takes up what an earlier try left; waits for another process
    /// that fetches the same.
    pub fn fetch(&self, _folder: &Path, _progress: &dyn Progress) -> Result<PathBuf> {
        unimplemented!()
    }
}
