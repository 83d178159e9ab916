//! Manifests and blobs to a registry.

use super::Client;
use crate::error::Result;
use crate::{Descriptor, Digest, Progress, Reference};
use std::io::{Read, Seek};

/// How a blob got to be in a repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Uploaded {
    /// It was there.
    There,
    /// The registry took it from another of its repositories.
    Mounted,
    /// Its bytes were sent.
    Sent,
}

/// Bytes that can be read more than once, for a retry.
pub trait Source: Read + Seek {}

impl<T: Read + Seek> Source for T {}

impl Client {
    /// Whether a repository has a blob.
    pub fn has_blob(
        &self,
        _repository: &Reference,
        _blob: &Descriptor,
        _progress: &dyn Progress,
    ) -> Result<bool> {
        unimplemented!()
    }

    /// Sees to it that a repository has a blob: looks, else takes it from
    /// `mount_from`, a repository of the same registry, else sends it from `source`'s
    /// present position.
    pub fn upload_blob(
        &self,
        _repository: &Reference,
        _blob: &Descriptor,
        _mount_from: Option<&str>,
        _source: &mut dyn Source,
        _progress: &dyn Progress,
    ) -> Result<Uploaded> {
        unimplemented!()
    }

    /// Puts a manifest under the reference's tag, or only under its digest if it has
    /// one and no tag. What it names must be there.
    pub fn put_manifest(
        &self,
        _reference: &Reference,
        _media_type: &str,
        _bytes: &[u8],
        _progress: &dyn Progress,
    ) -> Result<Digest> {
        unimplemented!()
    }
}
