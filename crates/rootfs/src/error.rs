//! Why a source was not imported.

use crate::archive::ArchiveError;
use crate::erofs::{PlanError, ReadError, WriteError};
use crate::layer::LayerError;
use crate::source::SourceError;
use crate::source::folder::FolderError;
use crate::tree::NameError;
use std::io;
use std::path::PathBuf;
use thiserror::Error;

/// A source was not imported; nothing was left behind.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ImportError {
    /// The source can't be used.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// One of several layers is refused.
    #[error("layer {number} of {of} ({name}) is refused")]
    InLayer {
        /// Which, the lowest being 1.
        number: usize,
        /// How many there are.
        of: usize,
        /// Its digest or file.
        name: String,
        /// Why.
        #[source]
        source: Box<ImportError>,
    },
    /// A layer's bytes are not what they should be.
    #[error(transparent)]
    Layer(LayerError),
    /// The archive is broken.
    #[error(transparent)]
    Archive(#[from] ArchiveError),
    /// An entry's name is not acceptable.
    #[error("\"{path}\" in the archive is refused")]
    Name {
        /// Its path.
        path: String,
        /// Why.
        #[source]
        source: NameError,
    },
    /// An entry's extended attributes can't be stored.
    #[error(
        "\"{path}\" in the archive has the extended attribute \"{name}\", which can't be stored"
    )]
    Xattr {
        /// Its path.
        path: String,
        /// The attribute.
        name: String,
    },
    /// An overlay's entry whose contents or name are elsewhere.
    #[error(
        "\"{0}\" in the changes was moved or only its attributes were copied; \
         mount the overlay with redirect_dir=off,metacopy=off"
    )]
    Elsewhere(String),
    /// More entries than allowed.
    #[error("the archive has more than {0} entries")]
    TooManyEntries(u64),
    /// The source holds nothing.
    #[error("the archive is empty")]
    Empty,
    /// The folder can't be imported.
    #[error(transparent)]
    Folder(FolderError),
    /// The parent image can't be read.
    #[error("the image {} can't be used", .path.display())]
    Image {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: ReadError,
    },
    /// The image can't be laid out.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The image can't be written.
    #[error(transparent)]
    Write(WriteError),
    /// Whoever watched wanted it to end.
    #[error("the import was cancelled")]
    Cancelled,
}

impl From<io::Error> for ImportError {
    fn from(error: io::Error) -> ImportError {
        ImportError::Write(WriteError::Io(error))
    }
}

impl From<WriteError> for ImportError {
    fn from(error: WriteError) -> ImportError {
        match error {
            WriteError::Cancelled => ImportError::Cancelled,
            error => ImportError::Write(error),
        }
    }
}

impl From<LayerError> for ImportError {
    fn from(error: LayerError) -> ImportError {
        match error {
            LayerError::Cancelled => ImportError::Cancelled,
            error => ImportError::Layer(error),
        }
    }
}

impl From<FolderError> for ImportError {
    fn from(error: FolderError) -> ImportError {
        match error {
            FolderError::Cancelled => ImportError::Cancelled,
            error => ImportError::Folder(error),
        }
    }
}
