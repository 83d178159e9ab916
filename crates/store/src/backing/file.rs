//! A backing file, open for a reader of the image.

use crate::error::{BackingFault, Fault};
use crate::format::{BackingRef, Entry};
use rustix::fs::{Mode, OFlags, open};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// An open backing file. It stays readable when it is removed.
#[derive(Debug)]
pub struct BackingFile {
    reference: BackingRef,
    path: PathBuf,
    file: File,
}

impl BackingFile {
    /// Opens the file of that name in the folder of the image at `image`.
    pub(crate) fn beside(image: &Path, reference: BackingRef) -> Result<BackingFile, Fault> {
        let path = image.with_file_name(&reference.name);
        let opened = || {
            // Does not follow a symbolic link, and does not block on a FIFO.
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let file = open(&path, flags, Mode::empty())
                .map_err(|error| BackingFault::Open(error.into()))?;
            let file = File::from(file);
            let metadata = file.metadata().map_err(BackingFault::Open)?;
            if !metadata.is_file() {
                return Err(BackingFault::NotAFile);
            }
            match metadata.len() == reference.size {
                true => Ok(file),
                false => Err(BackingFault::OtherSize {
                    found: metadata.len(),
                    wanted: reference.size,
                }),
            }
        };
        match opened() {
            Ok(file) => Ok(BackingFile {
                reference,
                path,
                file,
            }),
            Err(source) => Err(Fault::Backing {
                path,
                place: None,
                source,
            }),
        }
    }

    /// The image's reference to it.
    pub fn reference(&self) -> &BackingRef {
        &self.reference
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads a chunk and checks it against the entry's checksum.
    pub(crate) fn read(&self, index: u32, entry: &Entry, chunk: &mut [u8]) -> Result<(), Fault> {
        let read = self.file.read_exact_at(chunk, entry.offset);
        let source = match read {
            Ok(()) if crc_fast::crc32_iscsi(chunk) == entry.checksum => return Ok(()),
            Ok(()) => BackingFault::OtherContents,
            Err(error) => BackingFault::Read(error),
        };
        Err(self.failed(Some((index, entry.offset)), source))
    }

    /// Reads the whole file and checks it against its digest.
    pub(crate) fn verify(&self) -> Result<(), Fault> {
        let mut hasher = blake3::Hasher::new();
        let mut piece = vec![0; 1 << 20];
        let mut at = 0;
        while at < self.reference.size {
            let count = (self.reference.size - at).min(piece.len() as u64);
            let piece = &mut piece[..count as usize];
            self.file
                .read_exact_at(piece, at)
                .map_err(|error| self.failed(None, BackingFault::Read(error)))?;
            hasher.update(piece);
            at += count;
        }
        match hasher.finalize().as_bytes() == &self.reference.digest {
            true => Ok(()),
            false => Err(self.failed(None, BackingFault::OtherContents)),
        }
    }

    fn failed(&self, place: Option<(u32, u64)>, source: BackingFault) -> Fault {
        Fault::Backing {
            path: self.path.clone(),
            place,
            source,
        }
    }
}
