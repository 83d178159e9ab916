//! `image.json`: what is known of an image.

use super::config;
use crate::durable::LoadError;
use crate::records;
use jiffy_wire::api::{Image, ImageConfig, ImageSource};
use std::io;
use std::path::Path;

const FILE: &str = "image.json";

/// What is known of an image.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ImageRecord {
    /// BLAKE3 of the file system image, hexadecimal.
    pub digest: String,
    /// Bytes of it.
    pub size: u64,
    /// Files, folders and links in it.
    pub entries: u64,
    /// Unix time.
    pub created: u64,
    /// Size and modification time of the file that `base` was made from.
    pub built_in: Option<(u64, i64)>,
    /// Its file system is ext4, not EROFS.
    pub ext4: bool,
    /// What its commands are started with.
    pub config: ImageConfig,
    /// Where it came from.
    pub source: Option<ImageSource>,
    /// Ids of its image of chunks and of that one's parents, once there is
    /// one.
    pub chunks: Vec<String>,
    /// The image whose file system is the beginning of this one's, by the
    /// digest of its file system image.
    pub parent: Option<String>,
}

impl ImageRecord {
    /// Writes it into the image's folder.
    pub fn save(&self, folder: &Path) -> io::Result<()> {
        records::image::save(&file(folder), self.clone())
    }

    /// Reads what [`ImageRecord::save`] wrote, also of older releases.
    pub fn load(folder: &Path) -> Result<ImageRecord, LoadError> {
        let mut record = records::image::load(&file(folder))?;
        if config::check(&record.config).is_err() {
            // Nothing we wrote.
            record.config = ImageConfig::default();
        }
        Ok(record)
    }

    /// As the API shows it; what is on disk is left to the caller.
    pub fn shown(&self, name: &str) -> Image {
        Image {
            name: name.to_owned(),
            digest: self.digest.clone(),
            size: self.size,
            entries: self.entries,
            created: self.created,
            config: self.config.clone(),
            source: self.source.clone(),
            chunks: self.chunks.first().cloned(),
            present: self.size,
            stored: 0,
            used_by: Vec::new(),
            file: None,
            error: None,
        }
    }
}

/// Is the image in this folder one that came with a release, also if its record
/// is of one that is not known?
pub fn was_built_in(folder: &Path) -> bool {
    records::image::was_built_in(&file(folder))
}

/// Where the record is.
pub fn file(folder: &Path) -> std::path::PathBuf {
    folder.join(FILE)
}
