//! Manifests and blobs from a registry.

use super::Client;
use crate::error::Result;
use crate::manifest::Content;
use crate::{Descriptor, Digest, ImageManifest, Platform, Progress, Reference};
use std::fs::File;
use std::io::Write;
use std::ops::Range;

/// A manifest or index as it came. Its digest is that of its bytes, and the one in the
/// reference, if there was one.
#[derive(Clone, Debug)]
pub struct Fetched {
    /// The bytes, which the digest is of.
    pub bytes: Vec<u8>,
    /// Their media type.
    pub media_type: String,
    /// Their SHA-256.
    pub digest: Digest,
    /// What they say.
    pub content: Content,
}

/// An image for one platform.
#[derive(Clone, Debug)]
pub struct Image {
    /// Where it came from, pinned to the digest of the image's own manifest.
    pub reference: Reference,
    /// The index it was chosen from, if there was one.
    pub index: Option<Fetched>,
    /// Its manifest.
    pub fetched: Fetched,
    /// The same, read.
    pub manifest: ImageManifest,
}

impl Client {
    /// The manifest or index a reference stands for.
    pub fn manifest(&self, _reference: &Reference, _progress: &dyn Progress) -> Result<Fetched> {
        unimplemented!()
    }

    /// The digest of the manifest or index a reference stands for now, without
    /// fetching it; `None` if there is none.
    pub fn digest(
        &self,
        _reference: &Reference,
        _progress: &dyn Progress,
    ) -> Result<Option<Digest>> {
        unimplemented!()
    }

    /// The image a reference stands for; of an index, the one for `platform`.
    pub fn image(
        &self,
        _reference: &Reference,
        _platform: &Platform,
        _progress: &dyn Progress,
    ) -> Result<Image> {
        unimplemented!()
    }

    /// A whole blob in memory, refused when it is larger than `limit` bytes: for
    /// configurations.
    pub fn small_blob(
        &self,
        _repository: &Reference,
        _blob: &Descriptor,
        _limit: u64,
        _progress: &dyn Progress,
    ) -> Result<Vec<u8>> {
        unimplemented!()
    }

    /// Streams a blob into `sink`. A connection that breaks is taken up where it
    /// broke. `sink` never gets more bytes than the blob's size, but it may have got
    /// wrong ones when this fails: only success says that the digest is right.
    pub fn blob(
        &self,
        _repository: &Reference,
        _blob: &Descriptor,
        _sink: &mut dyn Write,
        _progress: &dyn Progress,
    ) -> Result<()> {
        unimplemented!()
    }

    /// Completes a file that may have the beginning of a blob. If the whole turns out
    /// wrong and part of it was there before, all is fetched anew, once. Does not sync.
    pub fn blob_to_file(
        &self,
        _repository: &Reference,
        _blob: &Descriptor,
        _file: &mut File,
        _progress: &dyn Progress,
    ) -> Result<()> {
        unimplemented!()
    }

    /// Some bytes of a blob, in one ranged read. **Not verified**: a part of a blob has
    /// no digest, so the caller must have a checksum of its own.
    pub fn blob_range(
        &self,
        _repository: &Reference,
        _blob: &Descriptor,
        _range: Range<u64>,
        _progress: &dyn Progress,
    ) -> Result<Vec<u8>> {
        unimplemented!()
    }

    /// The tags of a repository, as the registry orders them; at most 100,000.
    pub fn tags(&self, _repository: &Reference, _progress: &dyn Progress) -> Result<Vec<String>> {
        unimplemented!()
    }
}
