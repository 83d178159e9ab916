//! Origins: where missing bytes of an image can be fetched.

use crate::format::{ImageId, footer};
use crate::partial::map_path;
use crate::stop::Stop;
use std::fmt;
use std::fs::File;
use std::io;
use std::ops::{Deref, Range};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A source of the whole file of an image. It is not trusted: every chunk is checked against its
/// content hash.
pub trait Origin: Send + Sync {
    /// Its name for messages, such as `the folder /mnt/peer`.
    fn name(&self) -> String;

    /// Reads exactly these bytes of the image's file. It must not block forever, and must return
    /// soon after `stop` is cancelled.
    ///
    /// # Errors
    ///
    /// If the origin does not give all of the bytes. [`OriginError::again`] says whether a retry
    /// may succeed.
    fn fetch(&self, range: Range<u64>, stop: &Stop) -> Result<Bytes, OriginError>;

    /// The name of the registry that it waits for, so that a slow registry does not delay reads
    /// from others. Empty for an origin on this computer.
    fn waits_for(&self) -> String {
        String::new()
    }
}

/// Bytes that an origin gave, in memory of any kind.
#[derive(Clone)]
pub struct Bytes(Arc<dyn AsRef<[u8]> + Send + Sync>);

impl Bytes {
    /// The bytes of this memory, which must not change.
    pub fn of(memory: impl AsRef<[u8]> + Send + Sync + 'static) -> Bytes {
        Bytes(Arc::new(memory))
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        (*self.0).as_ref()
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} bytes", self.len())
    }
}

/// Why an origin did not give bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{why}")]
pub struct OriginError {
    /// Why, without the origin's name.
    pub why: String,
    /// Whether an immediate retry may succeed.
    pub again: bool,
}

impl OriginError {
    /// A permanent error: the origin does not have the bytes.
    pub fn permanent(why: impl Into<String>) -> OriginError {
        OriginError {
            why: why.into(),
            again: false,
        }
    }

    /// A transient error: the origin was slow, busy or out of reach.
    pub fn transient(why: impl Into<String>) -> OriginError {
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
    /// The image with this id in that folder, as an origin for the file `here`. The image is opened
    /// only when bytes are requested.
    pub fn new(folder: &Path, id: ImageId, here: &Path) -> PeerFolder {
        PeerFolder {
            folder: folder.to_owned(),
            file: folder.join(PeerFolder::file_name(id)),
            here: here.to_owned(),
        }
    }

    /// Whether the peer's file has the same length and footer: its chunks are then most likely at
    /// the same offsets. Images with the same id may be packed in many ways.
    fn has_same_footer(&self, peer_file: &File, length: u64) -> io::Result<bool> {
        let ours = File::open(&self.here)?;
        if ours.metadata()?.len() != length || length < footer::BYTES as u64 {
            return Ok(false);
        }
        let mut ends = [[0; footer::BYTES]; 2];
        for (file, end) in [&ours, peer_file].into_iter().zip(&mut ends) {
            file.read_exact_at(end, length - footer::BYTES as u64)?;
        }
        Ok(ends[0] == ends[1])
    }

    /// Fills `into` with bytes of the image's file, from `offset` on.
    ///
    /// # Errors
    ///
    /// If the folder lacks the image, has only parts of it or has it packed in another way, or the
    /// file can't be read.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), OriginError> {
        let mut read = || {
            // Does not follow a symbolic link, and does not block on a FIFO.
            let file = File::from(rustix::fs::open(
                &self.file,
                rustix::fs::OFlags::RDONLY
                    | rustix::fs::OFlags::NOFOLLOW
                    | rustix::fs::OFlags::NONBLOCK
                    | rustix::fs::OFlags::CLOEXEC,
                rustix::fs::Mode::empty(),
            )?);
            let metadata = file.metadata()?;
            if !metadata.is_file() || metadata.len() < offset.saturating_add(into.len() as u64) {
                return Err(io::Error::other("it has a different file there"));
            }
            if !self.has_same_footer(&file, metadata.len())? {
                return Err(io::Error::other("it has the image packed in another way"));
            }
            if map_path(&self.file).exists() {
                return Err(io::Error::other("it has only parts of the image"));
            }
            file.read_exact_at(into, offset)
        };
        read().map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => OriginError::permanent("it does not have this image"),
            _ => OriginError::permanent(error.to_string()),
        })
    }

    /// The file name of an image in such a folder: `ID.jimg`.
    pub fn file_name(id: ImageId) -> String {
        format!("{id}.jimg")
    }
}

impl Origin for PeerFolder {
    fn name(&self) -> String {
        format!("the folder {}", self.folder.display())
    }

    fn fetch(&self, range: Range<u64>, _: &Stop) -> Result<Bytes, OriginError> {
        let mut bytes = vec![0; (range.end - range.start) as usize];
        self.read(range.start, &mut bytes)?;
        Ok(Bytes::of(bytes))
    }
}
