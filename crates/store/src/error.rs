//! Errors of images.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// An error of an image or of a part of it. The message is one sentence that names the file and the
/// place.
#[derive(Debug)]
pub struct ImageError {
    /// The path of the image.
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
    // `Display` has the fault already.
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
    /// The file does not begin with the magic of images.
    #[error("is not an image: there is no magic at byte 0")]
    NotAnImage,
    /// The format version is not one that this program reads.
    #[error(
        "has format version {found} (at byte {offset}); this program reads versions {} and {}",
        known[0],
        known[1]
    )]
    Version {
        /// The version of the file.
        found: u32,
        /// The versions that this program reads.
        known: [u32; 2],
        /// Offset of the version in the file, bytes.
        offset: u64,
    },
    /// The end of the file is missing.
    #[error("is truncated: it has {length} bytes and no footer at byte {offset}")]
    Truncated {
        /// Bytes of the file.
        length: u64,
        /// Offset at which the footer was expected, bytes.
        offset: u64,
    },
    /// The header, the manifest or the footer is damaged.
    #[error("is damaged at byte {offset}: {what}")]
    Damaged {
        /// Offset in the file, bytes.
        offset: u64,
        /// What is wrong there.
        what: &'static str,
    },
    /// The bytes of a chunk are damaged.
    #[error("chunk {index} at byte {offset} is damaged: {what}")]
    Chunk {
        /// Number of the chunk.
        index: u32,
        /// Offset of its bytes in the file, bytes.
        offset: u64,
        /// What is wrong with them.
        what: &'static str,
    },
    /// The image has no chunk of this number.
    #[error("has {chunks} chunks, so no chunk {index}")]
    NoSuchChunk {
        /// The chunk asked for.
        index: u32,
        /// How many chunks the image has.
        chunks: u32,
    },
    /// A part of the image is missing, and no origin gives it.
    #[error("{} is not available: {tried}", part(.chunk, .offset, .length))]
    Unavailable {
        /// Number of the chunk, if the part is one of a chunk.
        chunk: Option<u32>,
        /// Offset in the file, bytes.
        offset: u64,
        /// Bytes wanted.
        length: u64,
        /// The origins that were asked, with their answers.
        tried: String,
    },
    /// The map of the blocks that are present cannot be used.
    #[error("the map {} of its present blocks cannot be used: {why}", path.display())]
    Map {
        /// The path of the map.
        path: PathBuf,
        /// Why not.
        why: String,
    },
    /// The parent cannot be read.
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
        /// The chunk and its offset in that file; `None` if the whole file cannot be used.
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
            format!("chunk {index} cannot be read from byte {offset} of its backing file {path}")
        }
        None => format!("its backing file {path} cannot be used"),
    }
}

/// Why a backing file cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackingFault {
    /// The file is missing or cannot be opened.
    #[error("it cannot be opened")]
    Open(#[source] io::Error),
    /// It is a folder, a symbolic link or a FIFO.
    #[error("it is not a file")]
    NotAFile,
    /// It is another file: its size differs.
    #[error("it has {found} bytes; the image was made from a file of {wanted} bytes")]
    OtherSize {
        /// Bytes of the file.
        found: u64,
        /// Bytes of the file that the image was made from.
        wanted: u64,
    },
    /// It is another file, or was changed: its digest differs.
    #[error("its contents are not those that the image was made from")]
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

/// Why a parent cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ParentFault {
    /// It was not found.
    #[error("it was not found")]
    NotFound(#[source] io::Error),
    /// It is damaged or missing.
    #[error(transparent)]
    Image(Box<ImageError>),
    /// Its id is not the one that the child names.
    #[error("its contents are not those that this image was made from")]
    OtherContents,
    /// Its chunks have another size.
    #[error("its chunks have another size")]
    OtherChunkSize,
    /// There are too many generations of parents.
    #[error("there are more than {most} generations of parents")]
    TooDeep {
        /// How many are followed.
        most: usize,
    },
}

/// Why an image could not be written. No file is left behind.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    /// The options contradict the format.
    #[error("{0}")]
    Options(String),
    /// The contents to be written cannot be read.
    #[error("the contents cannot be read at byte {offset}")]
    Source {
        /// Offset in the source, bytes.
        offset: u64,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The file cannot be written, for example because the disk is full.
    #[error("{} cannot be written", path.display())]
    Target {
        /// The path of the new image.
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
        /// Number of the chunk.
        index: u32,
        /// The codec's message.
        what: &'static str,
    },
}
