//! Where bytes of an image that are not here can be had.

use crate::format::ImageId;
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

    /// Exactly these bytes of the image's file. It must not wait for ever.
    fn fetch(&self, range: Range<u64>) -> Result<Vec<u8>, OriginError>;
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
}

impl PeerFolder {
    /// The image with this id in that folder. It is looked for when bytes are
    /// asked for.
    pub fn new(folder: &Path, id: ImageId) -> PeerFolder {
        PeerFolder {
            folder: folder.to_owned(),
            file: folder.join(PeerFolder::file_name(id)),
        }
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

    fn fetch(&self, range: Range<u64>) -> Result<Vec<u8>, OriginError> {
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
