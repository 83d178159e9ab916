//! Sources from which contents are read while an image is written.

use crate::tree::{Content, FolderFile, Input};
use rustix::fs::{Mode, OFlags, ResolveFlags};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use thiserror::Error;

/// Random access to bytes: a file, or an image that is only partly local.
pub trait ReadAt: Send + Sync {
    /// Fills `buffer` with the bytes from offset `at` on, in bytes.
    ///
    /// # Errors
    ///
    /// If not all of these bytes can be read.
    fn read_exact_at(&self, buffer: &mut [u8], at: u64) -> io::Result<()>;
    /// Size, bytes.
    ///
    /// # Errors
    ///
    /// If the size is not known, such as when `fstat` fails.
    fn size(&self) -> io::Result<u64>;
}

impl ReadAt for File {
    fn read_exact_at(&self, buffer: &mut [u8], at: u64) -> io::Result<()> {
        FileExt::read_exact_at(self, buffer, at)
    }

    fn size(&self) -> io::Result<u64> {
        crate::layer::size_of(self)
    }
}

/// Why contents can't be read.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum InputError {
    /// An input file can't be read.
    #[error("the imported data can't be read")]
    Read(#[source] io::Error),
    /// A file of the imported folder can't be read.
    #[error("\"{path}\" in the folder can't be read")]
    File {
        /// Its path below the folder.
        path: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A file of the imported folder changed since it was found.
    #[error("\"{0}\" in the folder was changed while it was imported; try again")]
    Changed(String),
}

/// All inputs of an import.
#[derive(Default)]
pub struct Inputs {
    /// Files, by their number in [`Input::File`].
    pub files: Vec<Arc<File>>,
    /// The parent image.
    pub parent: Option<Arc<dyn ReadAt>>,
    /// The imported folder.
    pub folder: Option<OwnedFd>,
}

impl Inputs {
    /// Opens one file's contents for reading.
    pub(super) fn open<'a>(&'a self, content: &'a Content) -> Result<Opened<'a>, InputError> {
        let file = match &content.path {
            Some(file) => Some(self.open_in_folder(file, content.size)?),
            None => None,
        };
        Ok(Opened {
            inputs: self,
            content,
            file,
        })
    }

    /// Reads a range of a file's bytes into `to`, and replaces its old contents.
    pub(crate) fn read(
        &self,
        content: &Content,
        at: u64,
        len: u64,
        to: &mut Vec<u8>,
    ) -> Result<(), InputError> {
        to.clear();
        let mut buffer = vec![0; len.min(1 << 20) as usize];
        self.open(content)?
            .copy(at..at + len, &mut buffer, |bytes| {
                match bytes {
                    Bytes::Read(bytes) => to.extend_from_slice(bytes),
                    Bytes::Zeros(count) => to.resize(to.len() + count as usize, 0),
                }
                Ok(())
            })
    }

    fn open_in_folder(&self, file: &FolderFile, size: u64) -> Result<File, InputError> {
        let name = || String::from_utf8_lossy(&file.path).into_owned();
        let failed = |source| InputError::File {
            path: name(),
            source,
        };
        let folder = self
            .folder
            .as_ref()
            .ok_or_else(|| failed(io::ErrorKind::NotFound.into()))?;
        let opened = rustix::fs::openat2(
            folder,
            file.path.as_slice(),
            OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC,
            Mode::empty(),
            ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS,
        );
        let opened = File::from(opened.map_err(|error| failed(error.into()))?);
        let data = opened.metadata().map_err(failed)?;
        let changed = (data.ctime(), data.ctime_nsec());
        if data.ino() != file.inode || changed != file.changed || data.len() != size {
            return Err(InputError::Changed(name()));
        }
        Ok(opened)
    }

    fn read_input(
        &self,
        input: Input,
        file: Option<&File>,
        buffer: &mut [u8],
        at: u64,
    ) -> io::Result<()> {
        let missing = || io::Error::from(io::ErrorKind::NotFound);
        match input {
            Input::File(number) => {
                let file = self.files.get(number as usize).ok_or_else(missing)?;
                FileExt::read_exact_at(file.as_ref(), buffer, at)
            }
            Input::Parent => self
                .parent
                .as_ref()
                .ok_or_else(missing)?
                .read_exact_at(buffer, at),
            Input::Folder => FileExt::read_exact_at(file.ok_or_else(missing)?, buffer, at),
        }
    }
}

/// One file's contents, open for reading.
pub(crate) struct Opened<'a> {
    inputs: &'a Inputs,
    content: &'a Content,
    file: Option<File>,
}

impl Opened<'_> {
    /// Passes the bytes of a range to `out` in order: data by way of `buffer`, holes as a count of
    /// zeros.
    ///
    /// # Errors
    ///
    /// If the bytes can't be read, the file was changed since it was found, or `out` fails.
    pub fn copy<E: From<InputError>>(
        &self,
        range: std::ops::Range<u64>,
        buffer: &mut [u8],
        mut out: impl FnMut(Bytes<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut at = range.start;
        let pieces = &self.content.pieces;
        let first = pieces.partition_point(|piece| piece.at + piece.len <= at);
        for piece in &pieces[first..] {
            if piece.at >= range.end {
                break;
            }
            if piece.at > at {
                out(Bytes::Zeros(piece.at - at))?;
                at = piece.at;
            }
            let end = range.end.min(piece.at + piece.len);
            while at < end {
                let most = (end - at).min(buffer.len() as u64) as usize;
                let from = piece.from + (at - piece.at);
                self.read(piece.input, &mut buffer[..most], from)?;
                out(Bytes::Read(&buffer[..most]))?;
                at += most as u64;
            }
        }
        if at < range.end {
            out(Bytes::Zeros(range.end - at))?;
        }
        Ok(())
    }

    fn read(&self, input: Input, buffer: &mut [u8], at: u64) -> Result<(), InputError> {
        let result = self
            .inputs
            .read_input(input, self.file.as_ref(), buffer, at);
        result.map_err(|source| match &self.content.path {
            Some(file) if source.kind() == io::ErrorKind::UnexpectedEof => {
                InputError::Changed(String::from_utf8_lossy(&file.path).into_owned())
            }
            Some(file) => InputError::File {
                path: String::from_utf8_lossy(&file.path).into_owned(),
                source,
            },
            None => InputError::Read(source),
        })
    }
}

/// Bytes of a file.
pub(crate) enum Bytes<'a> {
    /// Data.
    Read(&'a [u8]),
    /// This many zeros.
    Zeros(u64),
}
