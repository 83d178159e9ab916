//! `image.json`: the record of an image.

use super::both_ways;
use super::spec::ImageConfig;
use crate::durable::{self, LoadError};
use crate::model::image::ImageRecord;
use jiffy_wire::api;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::Path;

const FORMAT: &str = "jiffy-image";
const VERSION: u32 = 2;

/// See [`ImageRecord`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Image {
    digest: String,
    size: u64,
    entries: u64,
    created: u64,
    built_in: Option<(u64, i64)>,
    #[serde(default)]
    ext4: bool,
    #[serde(default)]
    config: ImageConfig,
    #[serde(default)]
    source: Option<ImageSource>,
    #[serde(default)]
    chunks: Vec<String>,
    #[serde(default)]
    parent: Option<String>,
}
both_ways!(
    Image,
    ImageRecord {
        digest: same,
        size: same,
        entries: same,
        created: same,
        built_in: same,
        ext4: same,
        config: into,
        source: opt,
        chunks: same,
        parent: same,
    }
);

/// Version 1.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageV1 {
    digest: String,
    size: u64,
    entries: u64,
    created: u64,
    built_in: Option<(u64, i64)>,
}

impl From<ImageV1> for ImageRecord {
    fn from(saved: ImageV1) -> ImageRecord {
        ImageRecord {
            digest: saved.digest,
            size: saved.size,
            entries: saved.entries,
            created: saved.created,
            built_in: saved.built_in,
            ..ImageRecord::default()
        }
    }
}

/// See [`api::ImageSource`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageSource {
    reference: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    manifest: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    signed_by: Vec<String>,
}
both_ways!(
    ImageSource,
    api::ImageSource {
        reference: same,
        manifest: same,
        signed_by: same,
    }
);

/// Writes an image's record.
///
/// # Errors
///
/// If the file can't be written, synced or renamed.
pub fn save(path: &Path, record: ImageRecord) -> io::Result<()> {
    durable::save(path, FORMAT, VERSION, &Image::from(record), true)
}

/// Reads what [`save`] wrote, in this release or an earlier one.
///
/// # Errors
///
/// If the file can't be read, is damaged, or is of another version.
pub fn load(path: &Path) -> Result<ImageRecord, LoadError> {
    durable::load_with(path, FORMAT, VERSION, |version, content| match version {
        1 => Some(serde_json::from_str::<ImageV1>(content).map(Into::into)),
        VERSION => Some(serde_json::from_str::<Image>(content).map(Into::into)),
        _ => None,
    })
}

/// Whether a record, of any version, says that its image came with a release.
pub fn was_built_in(path: &Path) -> bool {
    #[derive(Deserialize)]
    struct BuiltIn {
        built_in: Option<serde::de::IgnoredAny>,
    }
    durable::peek::<BuiltIn>(path, FORMAT).is_some_and(|it| it.built_in.is_some())
}
