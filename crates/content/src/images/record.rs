//! `image.json`: the record of an image.

use super::config;
use crate::durable::LoadError;
use crate::model::image::ImageRecord;
use crate::records;
use jiffy_wire::api::{Image, ImageConfig};
use std::io;
use std::path::Path;

const FILE: &str = "image.json";

impl ImageRecord {
    /// Writes it into the image's folder.
    ///
    /// # Errors
    ///
    /// If the file can't be written, synced or renamed.
    pub fn save(&self, folder: &Path) -> io::Result<()> {
        records::image::save(&file(folder), self.clone())
    }

    /// Reads what [`ImageRecord::save`] wrote, also of older releases.
    ///
    /// # Errors
    ///
    /// If the file can't be read, is damaged, or is of another version.
    pub fn load(folder: &Path) -> Result<ImageRecord, LoadError> {
        let mut record = records::image::load(&file(folder))?;
        if config::check(&record.config).is_err() {
            // Jiffy never writes such a configuration.
            record.config = ImageConfig::default();
        }
        Ok(record)
    }

    /// As the API shows it; the caller fills in the sizes on disk.
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

/// Whether the image in this folder came with a release, even if its record has an unknown version.
pub fn was_built_in(folder: &Path) -> bool {
    records::image::was_built_in(&file(folder))
}

/// Where the record is.
pub fn file(folder: &Path) -> std::path::PathBuf {
    folder.join(FILE)
}
