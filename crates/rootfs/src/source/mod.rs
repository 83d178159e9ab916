//! The source of an image: its configuration and its layers, located but not yet read.

mod bundle;
mod docker;
pub(crate) mod folder;
mod oci;

use crate::archive::ArchiveError;
use crate::config::{ConfigError, ImageConfig, RawConfig};
use crate::layer::{self, Blob, Compression, Expected, LayerError, Spool};
use crate::limits::Limits;
use crate::scratch::Scratch;
use bundle::{Bundle, DOCKER_MANIFEST, open_file};
use jiffy_oci::{Digest, DigestError, ManifestError, Platform, media_type, one_line};
use std::fs::File;
use std::io::{self, Read};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use thiserror::Error;

/// One layer of an image as a file: a tar, plain or compressed with gzip, zstd or xz. Its first bytes
/// say which.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Layer {
    /// The blob.
    pub path: PathBuf,
    /// Media type in the manifest. It must be that of a layer; the compression in it is ignored,
    /// because the blob's first bytes decide.
    pub media_type: String,
    /// Digest of the blob; checked if given.
    pub digest: Option<Digest>,
    /// Digest of the unpacked tar; checked if given.
    pub diff_id: Option<Digest>,
    /// Bytes of the blob; checked if given.
    pub size: Option<u64>,
}

/// Which image to take from a source that has several, and where to unpack.
#[derive(Debug, Clone)]
pub struct Choice {
    /// The platform that the image must run on.
    pub platform: Platform,
    /// The image's name or tag; required if there are several images.
    pub reference: Option<String>,
    /// The format of an archive: a root tar, an OCI layout or a Docker archive. `None` to detect it.
    pub format: Option<SourceKind>,
    /// Unnamed temporary files.
    pub scratch: Scratch,
    /// Limits on a compressed archive that must be unpacked to be read.
    pub limits: Limits,
}

impl Choice {
    /// `linux/amd64`, no name, temporary files in `scratch`.
    pub fn new(scratch: impl Into<PathBuf>) -> Choice {
        Choice {
            platform: Platform::default(),
            reference: None,
            format: None,
            scratch: Scratch::Folder(scratch.into()),
            limits: Limits::default(),
        }
    }
}

/// Format of a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SourceKind {
    /// A folder with a root file system.
    Folder,
    /// A tar of a root file system.
    RootTar,
    /// An OCI image layout, as a folder or as a tar.
    Oci,
    /// A `docker save` archive.
    DockerArchive,
    /// Layers that the caller fetched.
    Layers,
}

/// An image ready to be imported: located and its configuration read, its contents not yet read.
#[derive(Debug)]
pub struct Source {
    pub(crate) kind: SourceKind,
    pub(crate) config: ImageConfig,
    pub(crate) contents: Contents,
}

/// The contents to import.
#[derive(Debug)]
pub(crate) enum Contents {
    /// Layers, the lowest first.
    Layers(Vec<LayerInput>),
    /// A folder with a root file system.
    Folder(PathBuf),
}

/// A layer whose blob is present.
#[derive(Debug)]
pub(crate) struct LayerInput {
    pub blob: Blob,
    /// Name for messages.
    pub name: String,
    pub expected: Expected,
}

/// Why a source can't be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SourceError {
    /// One of its files can't be read.
    #[error("{} can't be read", .path.display())]
    Read {
        /// Its path.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A temporary file can't be written.
    #[error("a temporary file in {} can't be written", .path.display())]
    Scratch {
        /// The folder.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// An archive can't be unpacked.
    #[error("{} can't be unpacked", .path.display())]
    Unpack {
        /// Its path.
        path: PathBuf,
        /// The cause.
        #[source]
        source: LayerError,
    },
    /// An archive of an image is damaged or incomplete.
    #[error("{} can't be read", .path.display())]
    Archive {
        /// Its path.
        path: PathBuf,
        /// The cause.
        #[source]
        source: ArchiveError,
    },
    /// A manifest or index can't be used.
    #[error("{} is not valid", .path.display())]
    Manifest {
        /// Its path.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: ManifestError,
    },
    /// The version of a layout or the list of a Docker archive is not valid JSON of its kind.
    #[error("{} is not valid", .path.display())]
    Json {
        /// Its path.
        path: PathBuf,
        /// The error and its position.
        #[source]
        source: serde_json::Error,
    },
    /// An archive lacks a file that it refers to.
    #[error("{} refers to {name}, which is not in it", .path.display())]
    Missing {
        /// The archive.
        path: PathBuf,
        /// The file.
        name: String,
    },
    /// It is not of the format that it should be.
    #[error("it is not {0}")]
    OtherFormat(&'static str),
    /// An OCI layout of an unknown version.
    #[error("it is an OCI image layout of version {0:?}; only version 1 is supported")]
    Layout(String),
    /// It holds no image.
    #[error("it contains no image")]
    NoImage,
    /// It holds several images, and none was chosen.
    #[error("it contains several images, choose one of them: {0}")]
    WhichImage(String),
    /// The image that was asked for is not there.
    #[error("it contains no image {wanted:?}; it contains: {available}")]
    NoSuchImage {
        /// The name that was asked for.
        wanted: String,
        /// The names in the source.
        available: String,
    },
    /// It has no image for the platform.
    #[error("it contains no image for {wanted}; it contains: {available}")]
    NoPlatform {
        /// The wanted platform.
        wanted: String,
        /// The platforms in the source.
        available: String,
    },
    /// The image is for another platform.
    #[error("the image is for {actual}, and VMs on this node run {wanted}")]
    WrongPlatform {
        /// The platform of the image.
        actual: String,
        /// The platform it must be for.
        wanted: String,
    },
    /// Its indexes are nested too deep.
    #[error("its indexes are nested too deep")]
    TooDeep,
    /// It is not a container image.
    #[error("{what} is not a container image but {media_type:?}")]
    NotAnImage {
        /// The manifest's name.
        what: String,
        /// Its media type.
        media_type: String,
    },
    /// A layer's media type is not that of a layer, or the layer is encrypted.
    #[error("a layer has the media type {0:?}, which can't be imported")]
    MediaType(String),
    /// A digest in the configuration is malformed.
    #[error(transparent)]
    BadDigest(#[from] DigestError),
    /// A manifest or configuration has the wrong digest.
    #[error("a file has the digest {actual}, expected {expected}: it is damaged or was changed")]
    Digest {
        /// Digest in the file that refers to it.
        expected: Digest,
        /// Digest of its bytes.
        actual: Digest,
    },
    /// The manifest's number of layers is not the configuration's number of digests.
    #[error("the image has {layers} layers, but its configuration has {diff_ids}")]
    DiffIds {
        /// In the manifest.
        layers: usize,
        /// In the configuration.
        diff_ids: usize,
    },
    /// There are more than 1024 layers.
    #[error("the image has {0} layers, the limit is 1024")]
    TooManyLayers(usize),
    /// The image's configuration is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

impl Source {
    /// Finds out the format of `path`: a folder with an OCI layout or a root file system; or a
    /// file: an OCI archive, a `docker save` archive or a root file system's tar, each plain or
    /// compressed with gzip, zstd or xz.
    ///
    /// # Errors
    ///
    /// If `path` can't be read or unpacked, is not of the format in `choice`, its manifest or
    /// configuration is invalid, or no image in it is the chosen one and for the platform.
    pub fn open(path: &Path, choice: &Choice) -> Result<Source, SourceError> {
        let failed = |source| SourceError::Read {
            path: path.to_owned(),
            source,
        };
        if std::fs::metadata(path).map_err(failed)?.is_dir() {
            let bundle = Bundle::Folder(path.to_owned());
            if oci::is_layout(&bundle) {
                return Source::found(SourceKind::Oci, oci::open(&bundle, choice)?);
            }
            return Ok(Source::folder(path));
        }
        let blob = open_file(path).map_err(failed)?;
        Source::file(path, blob, choice)
    }

    /// Like [`Source::open`] for a file that is open; `name` is for messages.
    ///
    /// # Errors
    ///
    /// As for [`Source::open`].
    pub fn opened(file: File, name: &Path, choice: &Choice) -> Result<Source, SourceError> {
        let blob = Blob::whole(file).map_err(|source| SourceError::Read {
            path: name.to_owned(),
            source,
        })?;
        Source::file(name, blob, choice)
    }

    /// Like [`Source::open`] for a file that comes as a stream. It is unpacked into a temporary file.
    ///
    /// # Errors
    ///
    /// As for [`Source::open`], or if the temporary file can't be written.
    pub fn stream(reader: impl Read, choice: &Choice) -> Result<Source, SourceError> {
        let path = Path::new("the archive");
        let blob = layer::unpack_to_file(reader, &choice.scratch, choice.limits.bounds());
        let blob = blob.map_err(|source| unpack_failed(path, &choice.scratch, source))?;
        Source::file(path, blob, choice)
    }

    /// The root file system in a folder.
    pub fn folder(path: &Path) -> Source {
        Source {
            kind: SourceKind::Folder,
            config: ImageConfig::default(),
            contents: Contents::Folder(path.to_owned()),
        }
    }

    /// An image of fetched layers, the lowest first, and its configuration as JSON. A `diff_id`
    /// that is not given is taken from the configuration.
    ///
    /// # Errors
    ///
    /// If the configuration is invalid or for another platform, a layer can't be opened or is of
    /// another media type, or there are more than 1024 layers or not as many as digests.
    pub fn layers(config: &[u8], layers: &[Layer], choice: &Choice) -> Result<Source, SourceError> {
        Source::layers_with(config, layers, choice, |layer| open_file(&layer.path))
    }

    /// Like [`Source::layers`] for layers that are open; their paths are for messages.
    ///
    /// # Errors
    ///
    /// As for [`Source::layers`], or if there are fewer files than layers.
    pub fn opened_layers(
        config: &[u8],
        layers: &[Layer],
        files: Vec<File>,
        choice: &Choice,
    ) -> Result<Source, SourceError> {
        let mut files = files.into_iter();
        Source::layers_with(config, layers, choice, |_| {
            let file = files.next().ok_or(io::ErrorKind::NotFound)?;
            Blob::whole(file)
        })
    }

    fn layers_with(
        config: &[u8],
        layers: &[Layer],
        choice: &Choice,
        mut open: impl FnMut(&Layer) -> io::Result<Blob>,
    ) -> Result<Source, SourceError> {
        let config = RawConfig::from_json(config)?;
        check_platform(&config.platform(), choice)?;
        let layers = layers
            .iter()
            .map(|layer| {
                check_media_type(&layer.media_type)?;
                let blob = open(layer).map_err(|source| SourceError::Read {
                    path: layer.path.clone(),
                    source,
                })?;
                let name = match layer.digest {
                    Some(digest) => digest.to_string(),
                    None => layer.path.display().to_string(),
                };
                Ok(LayerInput {
                    blob,
                    name,
                    expected: Expected {
                        digest: layer.digest,
                        diff_id: layer.diff_id,
                        size: layer.size,
                    },
                })
            })
            .collect::<Result<Vec<_>, SourceError>>()?;
        Source::found(SourceKind::Layers, oci::Found { config, layers })
    }

    /// Its format.
    pub fn kind(&self) -> SourceKind {
        self.kind
    }

    /// The image's run configuration; empty for a folder or a root tar.
    pub fn config(&self) -> &ImageConfig {
        &self.config
    }

    fn file(path: &Path, blob: Blob, choice: &Choice) -> Result<Source, SourceError> {
        let failed = |source| SourceError::Read {
            path: path.to_owned(),
            source,
        };
        let tar = match blob.compression().map_err(failed)? {
            Compression::Plain => blob,
            _ => unpack_whole(path, &blob, choice)?,
        };
        let wanted = choice.format;
        let bundle = match wanted {
            Some(SourceKind::RootTar) => None,
            _ => Bundle::of_tar(path, &tar, wanted.is_some()).map_err(|source| {
                let path = path.to_owned();
                SourceError::Archive { path, source }
            })?,
        };
        if let Some(bundle) = bundle {
            // Newer versions of Docker write both; the OCI layout has more information.
            if wanted != Some(SourceKind::DockerArchive) && oci::is_layout(&bundle) {
                return Source::found(SourceKind::Oci, oci::open(&bundle, choice)?);
            }
            if wanted != Some(SourceKind::Oci) && bundle.has(DOCKER_MANIFEST) {
                return Source::found(SourceKind::DockerArchive, docker::open(&bundle, choice)?);
            }
        }
        match wanted {
            Some(SourceKind::Oci) => return Err(SourceError::OtherFormat("an OCI image layout")),
            Some(SourceKind::DockerArchive) => {
                return Err(SourceError::OtherFormat("a `docker save` archive"));
            }
            _ => {}
        }
        Ok(Source {
            kind: SourceKind::RootTar,
            config: ImageConfig::default(),
            contents: Contents::Layers(vec![LayerInput {
                blob: tar,
                name: String::new(),
                expected: Expected::default(),
            }]),
        })
    }

    fn found(kind: SourceKind, found: oci::Found) -> Result<Source, SourceError> {
        let oci::Found { config, mut layers } = found;
        if layers.len() > oci::MAX_LAYERS {
            return Err(SourceError::TooManyLayers(layers.len()));
        }
        let diff_ids = &config.rootfs.diff_ids;
        if !diff_ids.is_empty() && diff_ids.len() != layers.len() {
            return Err(SourceError::DiffIds {
                layers: layers.len(),
                diff_ids: diff_ids.len(),
            });
        }
        for (layer, text) in layers.iter_mut().zip(diff_ids) {
            let diff_id = text.parse()?;
            layer.expected.diff_id.get_or_insert(diff_id);
        }
        Ok(Source {
            kind,
            config: config.into_config()?,
            contents: Contents::Layers(layers),
        })
    }
}

/// Unpacks a compressed archive into an unnamed file.
fn unpack_whole(path: &Path, blob: &Blob, choice: &Choice) -> Result<Blob, SourceError> {
    let mut spool = Spool::new(&choice.scratch).map_err(|source| SourceError::Scratch {
        path: choice.scratch.folder().to_owned(),
        source,
    })?;
    let (_, unpacked) = layer::unpack(
        blob,
        &Expected::default(),
        choice.limits.bounds(),
        &mut spool,
        &AtomicU64::new(0),
        &mut || ControlFlow::Continue(()),
        |_| Ok::<_, LayerError>(()),
    )
    .map_err(|source| unpack_failed(path, &choice.scratch, source))?;
    Ok(unpacked.tar)
}

fn unpack_failed(path: &Path, scratch: &Scratch, error: LayerError) -> SourceError {
    match error {
        LayerError::Spool(source) => SourceError::Scratch {
            path: scratch.folder().to_owned(),
            source,
        },
        source => SourceError::Unpack {
            path: path.to_owned(),
            source,
        },
    }
}

/// Refuses a layer whose media type is not that of a tar, such as an encrypted one.
fn check_media_type(media_type: &str) -> Result<(), SourceError> {
    if media_type.is_empty() || media_type::is_layer(media_type) {
        Ok(())
    } else {
        Err(SourceError::MediaType(
            media_type.chars().take(120).collect(),
        ))
    }
}

fn check_platform(actual: &Platform, choice: &Choice) -> Result<(), SourceError> {
    // Old configurations name no platform.
    let unnamed = actual.os.is_empty() && actual.architecture.is_empty();
    if unnamed || choice.platform.runs(actual) {
        return Ok(());
    }
    Err(SourceError::WrongPlatform {
        actual: one_line(&actual.to_string()),
        wanted: choice.platform.to_string(),
    })
}

/// Whether `wanted` is this image: its whole name, or the end of the name after a slash, with or
/// without `:latest`.
fn is_called(name: &str, wanted: &str) -> bool {
    let names = [name, name.strip_suffix(":latest").unwrap_or(name)];
    names.iter().any(|name| {
        name.strip_suffix(wanted)
            .is_some_and(|before| before.is_empty() || before.ends_with('/'))
    })
}

#[cfg(test)]
mod tests {
    use super::is_called;

    #[test]
    fn a_short_name_matches_a_full_reference() {
        let name = "registry.example/library/alpine:latest";
        for wanted in [name, "alpine", "alpine:latest", "library/alpine"] {
            assert!(is_called(name, wanted), "{wanted}");
        }
        for wanted in ["pine", "latest", "alpine:3", "registry.example"] {
            assert!(!is_called(name, wanted), "{wanted}");
        }
        assert!(is_called("v1", "v1"));
    }
}
