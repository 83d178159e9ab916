//! Sends what the registry lacks.

use super::Artifact;
use crate::error::Result;
use crate::{Client, Digest, Progress, Reference};

/// What a push did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pushed {
    /// The manifest's digest.
    pub digest: Digest,
    /// Bytes of blobs that were sent.
    pub bytes_uploaded: u64,
    /// Bytes of all blobs, like ones counted once.
    pub bytes_total: u64,
}

impl Artifact {
    /// Puts the artifact into a registry under the reference's tag.
    pub fn push(
        &self,
        _client: &Client,
        _reference: &Reference,
        _progress: &dyn Progress,
    ) -> Result<Pushed> {
        unimplemented!()
    }
}
