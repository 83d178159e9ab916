//! Where an image comes from.

use crate::config::{ConfigError, ImageConfig, Platform};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use thiserror::Error;

/// One layer of an image as a file: a tar, plain or packed with gzip, zstd
/// or xz (its first bytes tell).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Layer {
    /// The blob.
    pub path: PathBuf,
    /// What the manifest says it is; checked against what it is.
    pub media_type: String,
    /// What the blob hashes to, `sha256:HEX`; checked when given.
    pub digest: Option<String>,
    /// What the unpacked tar hashes to, `sha256:HEX`; checked when given.
    pub diff_id: Option<String>,
    /// Bytes of the blob; checked when given.
    pub size: Option<u64>,
}

/// What to take where a source holds several images, and where to unpack.
#[derive(Debug, Clone)]
pub struct Choice {
    /// The platform it must run on.
    pub platform: Platform,
    /// The name or tag of the image, needed where there are several.
    pub reference: Option<String>,
    /// A folder for unnamed temporary files.
    pub scratch: PathBuf,
}

impl Choice {
    /// `linux/amd64`, the only image there is, temporary files in `scratch`.
    pub fn new(scratch: impl Into<PathBuf>) -> Choice {
        Choice {
            platform: Platform::default(),
            reference: None,
            scratch: scratch.into(),
        }
    }
}

/// What a source was found to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SourceKind {
    /// A folder, taken as the root file system.
    Folder,
    /// A tar of a root file system.
    RootTar,
    /// An OCI image layout, as a folder or as a tar.
    Oci,
    /// What `docker save` writes.
    DockerArchive,
    /// Layers somebody else fetched.
    Layers,
}

/// An image ready to be imported: found, its configuration read, its contents
/// not yet looked at.
#[derive(Debug)]
pub struct Source {
    kind: SourceKind,
    config: ImageConfig,
}

/// A source can't be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SourceError {
    /// A file of it can't be read.
    #[error("{} can't be read", .path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The image's configuration is no good.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

impl Source {
    /// Finds out what `path` is: an OCI layout or a root file system as a
    /// folder; or a file that is an OCI archive, a `docker save` archive or a
    /// root file system's tar, each plain or packed with gzip, zstd or xz.
    pub fn open(path: &Path, choice: &Choice) -> Result<Source, SourceError> {
        let _ = (path, choice);
        Ok(Source {
            kind: SourceKind::RootTar,
            config: ImageConfig::default(),
        })
    }

    /// The same for a file that comes as a stream; it is kept in an unnamed
    /// file in the scratch folder.
    pub fn stream(reader: impl Read, choice: &Choice) -> Result<Source, SourceError> {
        let _ = (reader, choice);
        Ok(Source {
            kind: SourceKind::RootTar,
            config: ImageConfig::default(),
        })
    }

    /// Layers that were fetched, the lowest first, and the bytes of the
    /// image's configuration. `diff_id`s left out are taken from it.
    pub fn layers(config: &[u8], layers: &[Layer], choice: &Choice) -> Result<Source, SourceError> {
        let _ = (layers, choice);
        Ok(Source {
            kind: SourceKind::Layers,
            config: ImageConfig::from_json(config)?,
        })
    }

    /// What it was found to be.
    pub fn kind(&self) -> SourceKind {
        self.kind
    }

    /// How the image says it is run; empty for a folder or a root tar.
    pub fn config(&self) -> &ImageConfig {
        &self.config
    }
}
