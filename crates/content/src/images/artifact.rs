//! Images as artifacts in registries (`docs/registry-artifacts.md`): the configuration blob, and
//! where files are cut into blobs.

use super::chunks::{BOOT, Chunks, DATA, MAX_CHAIN, TAIL, parse_id};
use super::config;
use crate::error::{Error, Result};
use crate::model::artifact::ImageArtifact;
use crate::model::image::ImageRecord;
use crate::records;
use jiffy_registry::artifact::{Config, FileToPush};
use jiffy_registry::{RemoteArtifact, RemoteFile};
use serde::Serialize;

/// The media type of the configuration blob.
pub const CONFIG_TYPE: &str = "application/vnd.jiffy.image.config.v1+json";
/// Largest file system of an image: twice what an import may make.
pub const MAX_SIZE: u64 = 256 << 30;
/// Largest tables that are accepted, bytes.
const MAX_TAIL: u64 = 1 << 30;
/// Smallest chunk, bytes, and the most bytes of tables for each: its entry, its hash, its place
/// in the working set and its part of its group (docs/image-format.md).
const MIN_CHUNK: u64 = 4096;
const MAX_TABLES_PER_CHUNK: u64 = 64;
/// Most further bytes of tables: a dictionary, names, header and footer.
const MAX_OTHER_TABLES: u64 = 2 << 20;

impl ImageArtifact {
    /// The configuration of an image whose chunks exist.
    pub fn of(record: &ImageRecord) -> ImageArtifact {
        ImageArtifact {
            os: "linux".to_owned(),
            architecture: "amd64".to_owned(),
            digest: record.digest.clone(),
            size: record.size,
            entries: record.entries,
            created: record.created,
            ext4: record.ext4,
            config: record.config.clone(),
            chunks: record.chunks.clone(),
        }
    }

    /// Reads and checks a blob of a registry.
    ///
    /// # Errors
    ///
    /// If the bytes are not such JSON, or as for [`check`](ImageArtifact::check).
    pub fn read(bytes: &[u8]) -> Result<ImageArtifact> {
        let read: records::artifact::ImageArtifact =
            serde_json::from_slice(bytes).map_err(|error| {
                Error::invalid(format!(
                    "The artifact's configuration is not that of an image: {error}."
                ))
            })?;
        let read = ImageArtifact::from(read);
        read.check()?;
        Ok(read)
    }

    /// Checks the values.
    ///
    /// # Errors
    ///
    /// If the platform, digest, size, list of chunks or configuration is one that no image here can
    /// have.
    pub fn check(&self) -> Result<()> {
        let wrong = |what: String| Err(Error::invalid(format!("The artifact {what}.")));
        if (self.os.as_str(), self.architecture.as_str()) != ("linux", "amd64") {
            let shown = |text: &str| -> String { text.chars().take(32).collect() };
            let platform = format!("{}/{}", shown(&self.os), shown(&self.architecture));
            return wrong(format!("is for {platform:?}; VMs here are linux/amd64"));
        }
        let hexadecimal = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        if self.digest.len() != 64 || !self.digest.bytes().all(hexadecimal) {
            return wrong("has no valid digest of its file system".to_owned());
        }
        if self.size == 0 || self.size > MAX_SIZE {
            return wrong(format!("declares a file system of {} bytes", self.size));
        }
        if self.chunks.is_empty() || self.chunks.len() > MAX_CHAIN {
            return wrong(format!("has {} images of chunks", self.chunks.len()));
        }
        for (index, id) in self.chunks.iter().enumerate() {
            parse_id(id)?;
            if self.chunks[..index].contains(id) {
                return wrong(format!("names the image of chunks {id} twice"));
            }
        }
        config::check(&self.config)
    }

    /// The blob.
    ///
    /// # Errors
    ///
    /// If it can't be written as JSON.
    pub fn blob(&self) -> Result<Config> {
        Ok(Config {
            media_type: CONFIG_TYPE.to_owned(),
            bytes: json(&records::artifact::ImageArtifact::from(self.clone()))?,
        })
    }
}

/// Most bytes that the tables of an image of `size` bytes can have.
pub fn max_tail(size: u64) -> u64 {
    let tables = size
        .div_ceil(MIN_CHUNK)
        .saturating_mul(MAX_TABLES_PER_CHUNK);
    tables.saturating_add(MAX_OTHER_TABLES).min(MAX_TAIL)
}

/// JSON of a configuration blob.
///
/// # Errors
///
/// If `value` can't be written as JSON.
pub fn json<T: Serialize>(value: &T) -> Result<Vec<u8>> {
    serde_json::to_vec(value)
        .map_err(|error| Error::internal(format!("A configuration can't be written: {error}.")))
}

/// An image of chunks that is complete here, cut so that each blob holds what is fetched
/// together: blocking.
///
/// # Errors
///
/// As for [`Chunks::cuts`].
pub fn local_file(chunks: &Chunks, id: &str) -> Result<FileToPush> {
    let (boot, tail) = chunks.cuts(id)?;
    Ok(cut(&Chunks::file_name(id), chunks.path(id), boot, tail))
}

/// A file of chunks whose boot set ends at `boot` and whose tables begin at `tail`.
pub fn cut(name: &str, path: std::path::PathBuf, boot: u64, tail: u64) -> FileToPush {
    match boot {
        0 => FileToPush::local(name, path, DATA),
        boot if boot >= tail => FileToPush::local(name, path, BOOT),
        boot => FileToPush::local(name, path, BOOT).cut(boot, DATA),
    }
    .cut(tail, TAIL)
    .read_in_parts()
}

/// The file of this name.
///
/// # Errors
///
/// If the artifact has no file of this name.
pub fn file_of<'a>(artifact: &'a RemoteArtifact, name: &str) -> Result<&'a RemoteFile> {
    artifact.file(name).ok_or_else(|| {
        Error::registry(format!(
            "The artifact {} has no file {name}.",
            artifact.reference()
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn valid() -> ImageArtifact {
        ImageArtifact::of(&ImageRecord {
            digest: "0".repeat(64),
            size: 4096,
            chunks: vec!["0".repeat(32), "1".repeat(32)],
            ..ImageRecord::default()
        })
    }

    #[test]
    fn the_tables_size_is_bounded_by_the_declared_size() {
        assert_eq!(max_tail(1), 64 + (2 << 20));
        assert_eq!(max_tail(1 << 30), (16 << 20) + (2 << 20));
        assert_eq!(max_tail(u64::MAX), MAX_TAIL);
    }

    #[test]
    fn a_configuration_survives_a_round_trip_and_a_bad_one_is_refused() {
        let blob = valid().blob().unwrap();
        assert_eq!(ImageArtifact::read(&blob.bytes).unwrap(), valid());
        let refused = |change: fn(&mut ImageArtifact)| {
            let mut artifact = valid();
            change(&mut artifact);
            ImageArtifact::read(&artifact.blob().unwrap().bytes)
                .unwrap_err()
                .0
                .message
        };
        assert!(refused(|it| it.architecture = "arm64".into()).contains("arm64"));
        assert!(refused(|it| it.digest = "../x".into()).contains("digest"));
        assert!(refused(|it| it.size = 0).contains("bytes"));
        assert!(refused(|it| it.size = u64::MAX).contains("bytes"));
        assert!(refused(|it| it.chunks.clear()).contains("0 images"));
        assert!(refused(|it| it.chunks[0] = "../../etc".into()).contains("id"));
        assert!(refused(|it| it.chunks[0] = it.chunks[1].clone()).contains("twice"));
        assert!(refused(|it| it.config.env = vec!["x".into()]).contains("NAME=value"));
        assert!(ImageArtifact::read(b"[]").is_err());
    }
}
