//! How files become an artifact.

use crate::error::Result;
use crate::{Descriptor, Digest, Progress, Reference, RemoteFile};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The configuration blob of an artifact: what it is, for Jiffy.
#[derive(Clone, Debug)]
pub struct Config {
    /// Its media type.
    pub media_type: String,
    /// Its bytes, usually JSON; at most 4 MiB.
    pub bytes: Vec<u8>,
}

/// A file to become packs.
#[derive(Clone, Debug)]
#[allow(dead_code)]
pub struct FileToPush {
    name: String,
}

/// Some bytes of a file: one layer.
#[derive(Clone, Debug)]
pub struct Pack {
    /// Its digest, size, and annotations.
    pub blob: Descriptor,
    /// The file's name.
    pub file: String,
    /// Its first byte in the file.
    pub offset: u64,
    /// What its bytes are to the file.
    pub role: String,
}

/// Files, cut and hashed: what there is to push.
#[derive(Clone, Debug)]
pub struct Artifact {
    manifest: Vec<u8>,
    packs: Vec<Pack>,
}

impl FileToPush {
    /// A file on disk, in one segment with this role. It must not change until it was
    /// pushed.
    pub fn local(name: &str, _path: impl Into<PathBuf>, _role: &str) -> Self {
        Self {
            name: name.to_owned(),
        }
    }

    /// Begins another segment, and with it a pack, at this byte. Cuts at 0, at the
    /// file's end or behind it only name the role of what follows. To be called in
    /// ascending order.
    #[must_use]
    pub fn cut(self, _offset: u64, _role: &str) -> Self {
        self
    }

    /// A file of an artifact that is in a registry already, such as a parent's. Its
    /// packs are listed as they are; a push finds them there, mounts them from
    /// `origin`'s repository, or copies them from there.
    pub fn remote(name: &str, _file: &RemoteFile) -> Self {
        Self {
            name: name.to_owned(),
        }
    }
}

impl Artifact {
    /// Cuts and hashes the files. The same type, configuration, annotations and files
    /// give the same artifact.
    pub fn plan(
        _artifact_type: &str,
        _config: Config,
        _annotations: BTreeMap<String, String>,
        _files: Vec<FileToPush>,
        _progress: &dyn Progress,
    ) -> Result<Self> {
        unimplemented!()
    }

    /// The manifest's bytes.
    pub fn manifest(&self) -> &[u8] {
        &self.manifest
    }

    /// The manifest's digest, which is the artifact's name.
    pub fn digest(&self) -> Digest {
        Digest::of(&self.manifest)
    }

    /// All packs, in the order of the manifest.
    pub fn packs(&self) -> &[Pack] {
        &self.packs
    }

    /// Bytes of all blobs, like ones counted once.
    pub fn size(&self) -> u64 {
        unimplemented!()
    }

    #[allow(dead_code)]
    fn origin(&self) -> Option<&Reference> {
        None
    }
}
