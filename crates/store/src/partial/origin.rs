//! Where bytes of an image that are not here can be had.

use crate::format::{ImageId, footer};
use crate::partial::map_path;
use crate::stop::Stop;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Somebody who has the whole file of an image. Nobody believes what he gives:
/// every chunk is held against its content hash.
pub trait Origin: Send + Sync {
    /// For messages: `the folder /mnt/peer`, say.
    fn name(&self) -> String;

    /// Exactly these bytes of the image's file. It must not wait for ever, and not long
    /// once it is given up.
    fn fetch(&self, range: Range<u64>, stop: &Stop) -> Result<Vec<u8>, OriginError>;

    /// Whom it waits for, so that one that is slow can be kept from holding up others:
    /// the registry's name. Empty for what is on this computer.
    fn waits_for(&self) -> String {
        String::new()
    }
}

/// Bytes that an origin does not give.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{why}")]
pub struct OriginError {
    /// Why, without the origin's name.
    pub why: String,
    /// It may be worth to ask again at once.
    pub again: bool,
}

impl OriginError {
    /// It does not have them, and will not have them in a moment.
    pub fn never(why: impl Into<String>) -> OriginError {
        OriginError {
            why: why.into(),
            again: false,
        }
    }

    /// It was slow, busy or out of reach.
    pub fn for_now(why: impl Into<String>) -> OriginError {
        OriginError {
            why: why.into(),
            again: true,
        }
    }
}

/// A folder of whole images named by their ids: a peer's cache.
#[derive(Debug)]
pub struct PeerFolder {
    folder: PathBuf,
    file: PathBuf,
    here: PathBuf,
}

impl PeerFolder {
    /// The image with this id in that folder, for the one that is `here`. It is
    /// looked for when bytes are asked for.
    pub fn new(folder: &Path, id: ImageId, here: &Path) -> PeerFolder {
        PeerFolder {
            folder: folder.to_owned(),
            file: folder.join(PeerFolder::file_name(id)),
            here: here.to_owned(),
        }
    }

    /// Whether a file says, with its last bytes, that its chunks lie where they do
    /// here. An image may be packed in many ways.
    fn is_packed_alike(&self, theirs: &File, length: u64) -> io::Result<bool> {
        let ours = File::open(&self.here)?;
        if ours.metadata()?.len() != length || length < footer::BYTES as u64 {
            return Ok(false);
        }
        let mut ends = [[0; footer::BYTES]; 2];
        for (file, end) in [&ours, theirs].into_iter().zip(&mut ends) {
            file.read_exact_at(end, length - footer::BYTES as u64)?;
        }
        Ok(ends[0] == ends[1])
    }

    /// What an image is called in such a folder: `ID.jimg`.
    pub fn file_name(id: ImageId) -> String {
        format!("{id}.jimg")
    }
}

impl Origin for PeerFolder {
    fn name(&self) -> String {
        format!("the folder {}", self.folder.display())
    }

    fn fetch(&self, range: Range<u64>, _: &Stop) -> Result<Vec<u8>, OriginError> {
        let read = || {
            // Not through a link to elsewhere, and no pipe that never answers.
            let file = File::from(rustix::fs::open(
                &self.file,
                rustix::fs::OFlags::RDONLY
                    | rustix::fs::OFlags::NOFOLLOW
                    | rustix::fs::OFlags::NONBLOCK
                    | rustix::fs::OFlags::CLOEXEC,
                rustix::fs::Mode::empty(),
            )?);
            let metadata = file.metadata()?;
            if !metadata.is_file() || metadata.len() < range.end {
                return Err(io::Error::other("it has another file there"));
            }
            if !self.is_packed_alike(&file, metadata.len())? {
                return Err(io::Error::other("it has the image packed in another way"));
            }
            if map_path(&self.file).exists() {
                return Err(io::Error::other("it has only parts of the image"));
            }
            let mut bytes = vec![0; (range.end - range.start) as usize];
            file.read_exact_at(&mut bytes, range.start)?;
            Ok(bytes)
        };
        read().map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => OriginError::never("it does not have this image"),
            _ => OriginError::never(error.to_string()),
        })
    }
}
