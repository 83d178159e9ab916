//! What can be wrong with an image.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// An image that cannot be read, or a part of it. One sentence that names the
/// file and the place.
#[derive(Debug)]
pub struct ImageError {
    /// The image.
    pub path: PathBuf,
    /// What is wrong with it.
    pub fault: Box<Fault>,
}

impl fmt::Display for ImageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path.display(), self.fault)
    }
}

impl Error for ImageError {
    // The fault is said already.
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.fault.source()
    }
}

impl ImageError {
    pub(crate) fn new(path: &Path, fault: impl Into<Box<Fault>>) -> ImageError {
        ImageError {
            path: path.to_owned(),
            fault: fault.into(),
        }
    }
}

/// What is wrong with an image.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// It cannot be opened.
    #[error("cannot be opened")]
    Open(#[source] io::Error),
    /// The host could not read a part of it.
    #[error("{length} bytes at byte {offset} cannot be read")]
    Read {
        /// Where in the file.
        offset: u64,
        /// Bytes wanted.
        length: u64,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// Something else.
    #[error("is not an image: there is no magic at byte 0")]
    NotAnImage,
    /// Of a format this program does not know.
    #[error(
        "has format version {found} (at byte {offset}); this program reads versions {} and {}",
        crate::format::VERSION,
        crate::format::VERSION_WITH_BACKING
    )]
    Version {
        /// Its version.
        found: u32,
        /// Where it says so.
        offset: u64,
    },
    /// Its end is missing.
    #[error("is cut off: it has {length} bytes and no footer at byte {offset}")]
    Truncated {
        /// Bytes it has.
        length: u64,
        /// Where the footer was looked for.
        offset: u64,
    },
    /// Header, manifest or footer are wrong.
    #[error("is damaged at byte {offset}: {what}")]
    Damaged {
        /// Where in the file.
        offset: u64,
        /// What is wrong there.
        what: &'static str,
    },
    /// A chunk's bytes are wrong.
    #[error("chunk {index} at byte {offset} is damaged: {what}")]
    Chunk {
        /// Which chunk.
        index: u32,
        /// Where its bytes are in the file.
        offset: u64,
        /// What is wrong with them.
        what: &'static str,
    },
    /// There is no such chunk.
    #[error("has {chunks} chunks, so no chunk {index}")]
    NoSuchChunk {
        /// The chunk asked for.
        index: u32,
        /// How many there are.
        chunks: u32,
    },
    /// A part of it is not here, and no origin gives it.
    #[error("{} cannot be had: {tried}", part(.chunk, .offset, .length))]
    Unavailable {
        /// Which chunk, if it is a chunk's part.
        chunk: Option<u32>,
        /// Where in the file.
        offset: u64,
        /// Bytes wanted.
        length: u64,
        /// Who was asked, and what each said.
        tried: String,
    },
    /// The map of what is here of it cannot be used.
    #[error("the map {} of what is here of it cannot be used: {why}", path.display())]
    Map {
        /// The map.
        path: PathBuf,
        /// Why not.
        why: String,
    },
    /// The parent cannot be had.
    #[error("its parent {name} cannot be read")]
    Parent {
        /// The parent's name.
        name: String,
        /// Why not.
        #[source]
        source: ParentFault,
    },
    /// The backing file cannot be used, or a chunk of it.
    #[error("{}", backing(.path, .place))]
    Backing {
        /// The backing file.
        path: PathBuf,
        /// Which chunk, and where in that file; none if it is the whole file.
        place: Option<(u32, u64)>,
        /// Why not.
        #[source]
        source: BackingFault,
    },
}

fn backing(path: &Path, place: &Option<(u32, u64)>) -> String {
    let path = path.display();
    match place {
        Some((index, offset)) => {
            format!("chunk {index} cannot be had from byte {offset} of its backing file {path}")
        }
        None => format!("its backing file {path} cannot be used"),
    }
}

/// Why a backing file cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackingFault {
    /// It is not there, or cannot be opened.
    #[error("it cannot be opened")]
    Open(#[source] io::Error),
    /// It is a folder, a link or a pipe.
    #[error("it is not a file")]
    NotAFile,
    /// It is another file.
    #[error("it has {found} bytes, and the image was made from one with {wanted}")]
    OtherSize {
        /// Bytes it has.
        found: u64,
        /// Bytes it had.
        wanted: u64,
    },
    /// It is another file, or was changed.
    #[error("it holds other contents than the image was made from")]
    OtherContents,
    /// The host could not read a part of it.
    #[error("it cannot be read")]
    Read(#[source] io::Error),
}

fn part(chunk: &Option<u32>, offset: &u64, length: &u64) -> String {
    match chunk {
        Some(index) => format!("chunk {index} at byte {offset}"),
        None => format!("{length} bytes at byte {offset}"),
    }
}

/// Why a parent cannot be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ParentFault {
    /// Nobody knows where it is.
    #[error("it was not found")]
    NotFound(#[source] io::Error),
    /// It is damaged, or not there.
    #[error(transparent)]
    Image(Box<ImageError>),
    /// It holds something else than the child was made from.
    #[error("it holds other contents than this image was made from")]
    OtherContents,
    /// It has chunks of another size.
    #[error("its chunks have another size")]
    OtherChunkSize,
    /// Parents of parents, too many.
    #[error(
        "there are more than {} generations of parents",
        crate::format::MAX_DEPTH
    )]
    TooDeep,
}

/// An image that could not be written. Nothing is left behind.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    /// The options contradict the format.
    #[error("{0}")]
    Options(String),
    /// What was to be written cannot be read.
    #[error("the contents cannot be read at byte {offset}")]
    Source {
        /// Where in the source.
        offset: u64,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The file cannot be written: no space, say.
    #[error("{} cannot be written", path.display())]
    Target {
        /// The image to be.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The parent, or the image to be rewritten, cannot be read.
    #[error("cannot be made from the other image")]
    Image(#[from] ImageError),
    /// A chunk cannot be compressed.
    #[error("chunk {index} cannot be compressed: {what}")]
    Compress {
        /// Which chunk.
        index: u32,
        /// What the codec says.
        what: &'static str,
    },
}
