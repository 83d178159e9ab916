//! Descriptors (OCI image specification, `descriptor.md`).

use crate::digest::Digest;
use crate::null::null_as_default;
use crate::platform::Platform;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Type, digest and size of a blob or manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    /// Media type of the bytes.
    pub media_type: String,
    /// SHA-256, which identifies and verifies the bytes.
    pub digest: Digest,
    /// Size, bytes.
    pub size: u64,
    /// Annotations.
    #[serde(
        default,
        deserialize_with = "null_as_default",
        skip_serializing_if = "BTreeMap::is_empty"
    )]
    pub annotations: BTreeMap<String, String>,
    /// In an index: the platform of the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<Platform>,
    /// In an index: the artifact type.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub artifact_type: Option<String>,
}

impl Descriptor {
    /// The descriptor of these bytes.
    pub fn of(media_type: &str, bytes: &[u8]) -> Self {
        Self::new(media_type, Digest::of(bytes), bytes.len() as u64)
    }

    /// A descriptor without annotations.
    pub fn new(media_type: &str, digest: Digest, size: u64) -> Self {
        Self {
            media_type: media_type.to_owned(),
            digest,
            size,
            annotations: BTreeMap::new(),
            platform: None,
            artifact_type: None,
        }
    }
}
