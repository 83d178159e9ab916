//! Errors of an import.

use crate::archive::ArchiveError;
use crate::erofs::{InputError, PlanError, ReadError, WriteError};
use crate::layer::LayerError;
use crate::source::SourceError;
use crate::source::folder::FolderError;
use crate::tree::NameError;
use std::io;
use std::path::PathBuf;
use thiserror::Error;

/// Why a source was not imported. Nothing is left behind.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ImportError {
    /// The source can't be used.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// One of several layers is refused.
    #[error("layer {number} of {of} ({name}) is refused")]
    InLayer {
        /// Its number; the lowest layer is 1.
        number: usize,
        /// The number of layers.
        of: usize,
        /// Its digest or file.
        name: String,
        /// The cause.
        #[source]
        source: Box<ImportError>,
    },
    /// A layer's size, digest or compression is wrong.
    #[error(transparent)]
    Layer(LayerError),
    /// The archive can't be read.
    #[error(transparent)]
    Archive(#[from] ArchiveError),
    /// An entry's name is not acceptable.
    #[error("\"{path}\" in the archive is refused")]
    Name {
        /// Its path.
        path: String,
        /// The cause.
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
    /// An entry of an overlay whose contents or name are in another layer.
    #[error(
        "\"{0}\" in the changes was moved or only its attributes were copied; \
         mount the overlay with redirect_dir=off,metacopy=off"
    )]
    OtherLayer(String),
    /// There are more entries than allowed.
    #[error("the archive has more than {0} entries")]
    TooManyEntries(u64),
    /// The source has no entries.
    #[error("the archive is empty")]
    Empty,
    /// The folder can't be imported.
    #[error(transparent)]
    Folder(FolderError),
    /// An image of Jiffy, such as the parent of a child, can't be used.
    #[error("the image {} can't be used", .path.display())]
    Image {
        /// Its path.
        path: PathBuf,
        /// The cause.
        #[source]
        source: ReadError,
    },
    /// The new image can't be planned.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The image can't be written.
    #[error(transparent)]
    Write(WriteError),
    /// The watcher cancelled it.
    #[error("the import was cancelled")]
    Cancelled,
}

impl From<io::Error> for ImportError {
    fn from(error: io::Error) -> ImportError {
        ImportError::Write(WriteError::Io(error))
    }
}

impl From<InputError> for ImportError {
    fn from(error: InputError) -> ImportError {
        ImportError::Write(WriteError::Input(error))
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
