//! A tar stream into an image file.

use crate::archive::{Archive, ArchiveError, Entry, EntryKind};
use crate::erofs::{ContentWriter, WriteError, finish};
use crate::tree::{Attributes, Kind, NameError, Tree};
use std::fs::File;
use std::io::{self, Read};
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
