//! `image.json`: what is known of an image.

use super::config;
use crate::durable::{self, LoadError};
use jiffy_wire::api::{Image, ImageConfig, ImageSource};
use serde::{Deserialize, Serialize};
use std::io;
use std::path::Path;

const FORMAT: &str = "jiffy-image";
/// Version 2 added all that has a default here.
const VERSION: u32 = 2;
const READABLE: [u32; 2] = [1, VERSION];
const FILE: &str = "image.json";

/// What is known of an image.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
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
    #[serde(default)]
    pub ext4: bool,
    /// What its commands are started with.
    #[serde(default)]
    pub config: ImageConfig,
    /// Where it came from.
    #[serde(default)]
    pub source: Option<ImageSource>,
    /// Ids of its image of chunks and of that one's parents, once there is
    /// one.
    #[serde(default)]
    pub chunks: Vec<String>,
    /// The image whose file system is the beginning of this one's, by the
    /// digest of its file system image.
    #[serde(default)]
    pub parent: Option<String>,
}

impl ImageRecord {
    /// Writes it into the image's folder.
    pub fn save(&self, folder: &Path) -> io::Result<()> {
        durable::save(&folder.join(FILE), FORMAT, VERSION, self, true)
    }

    /// Reads what [`ImageRecord::save`] wrote, also of older releases.
    pub fn load(folder: &Path) -> Result<ImageRecord, LoadError> {
        let path = folder.join(FILE);
        let mut record: ImageRecord = durable::load_any(&path, FORMAT, &READABLE)?;
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
        }
    }
}

/// Where the record is.
pub fn file(folder: &Path) -> std::path::PathBuf {
    folder.join(FILE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_of_the_first_version_is_read() {
        let folder = tempfile::tempdir().unwrap();
        #[derive(Serialize)]
        struct Version1 {
            digest: String,
            size: u64,
            entries: u64,
            created: u64,
            built_in: Option<(u64, i64)>,
        }
        let old = Version1 {
            digest: "d".into(),
            size: 4096,
            entries: 7,
            created: 1,
            built_in: Some((1, 2)),
        };
        durable::save(&file(folder.path()), FORMAT, 1, &old, true).unwrap();
        let read = ImageRecord::load(folder.path()).unwrap();
        assert_eq!((read.size, read.built_in), (4096, Some((1, 2))));
        assert_eq!(read.config, ImageConfig::default());
        read.save(folder.path()).unwrap();
        assert_eq!(ImageRecord::load(folder.path()).unwrap(), read);
        durable::save(&file(folder.path()), FORMAT, 3, &old, true).unwrap();
        assert!(matches!(
            ImageRecord::load(folder.path()).unwrap_err(),
            LoadError::OtherVersion { found: 3, .. }
        ));
    }
}
