//! A folder of the host as a root file system.
//!
//! The folder may change while it is read, by someone who wants to redirect the reader: no link is
//! followed, each step starts at an open folder, and a file that is read later must be the same as
//! the one that was found.

use crate::tree::{
    Attributes, Content, FolderFile, Input, Kind, MAX_PATH, NameError, NodeId, Piece, Tree,
};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, SeekFrom, Stat};
use rustix::io::Errno;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use thiserror::Error;

/// Magic numbers of the kernel's virtual file systems (`linux/magic.h`): proc, sysfs, devpts,
/// cgroup, cgroup2, debugfs, tracefs, bpf, securityfs, efivarfs.
const VIRTUAL_FILE_SYSTEMS: [i64; 10] = [
    0x9fa0,
    0x6265_6572,
    0x1cd1,
    0x0027_e0eb,
    0x6367_7270,
    0x6462_6720,
    0x7472_6163,
    0xcafe_4a11,
    0x7363_6673,
    0xde5e_81e4,
];
/// Size limit of a list of attribute names and of a value, bytes (Linux XATTR_LIST_MAX,
/// XATTR_SIZE_MAX).
const MAX_XATTR_LIST: usize = 64 * 1024;

/// Why a folder can't be imported.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FolderError {
    /// A file or folder in it can't be read.
    #[error("\"{path}\" in the folder can't be read")]
    Read {
        /// Its path below the folder.
        path: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A virtual file system of the kernel is mounted in it.
    #[error("\"{0}\" in the folder is a mounted kernel file system; unmount it")]
    Mounted(String),
    /// A name or path is too long, or there are too many.
    #[error("\"{path}\" in the folder is refused")]
    Name {
        /// Its path.
        path: String,
        /// The cause.
        #[source]
        source: NameError,
    },
    /// The watcher cancelled it.
    #[error("the import was cancelled")]
    Cancelled,
}

/// Result of a walk.
pub(crate) struct Walked {
    /// The folder, from which contents are read.
    pub folder: OwnedFd,
    /// Files, folders, links and devices.
    pub entries: u64,
    /// Extended attributes left out, because an image can't hold their kind.
    pub dropped: u64,
}

/// Adds everything in the folder to the tree, except sockets, which tar leaves out as well.
pub(crate) fn walk(
    path: &Path,
    tree: &mut Tree,
    watch: &mut dyn FnMut() -> ControlFlow<()>,
) -> Result<Walked, FolderError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(path, flags, Mode::empty()).map_err(|error| failed(b"/", error))?;
    let mut walk = Walk {
        root,
        tree,
        links: HashMap::new(),
        entries: 0,
        dropped: 0,
    };
    let stat = rustix::fs::fstat(&walk.root).map_err(|error| failed(b"/", error))?;
    let attributes = walk.attributes(b"/", &stat, &proc_path(&walk.root, b"."))?;
    let named = |source| FolderError::Name {
        path: "/".into(),
        source,
    };
    let tree_root = walk
        .tree
        .insert(b"/", Kind::folder(), attributes)
        .map_err(named)?;
    let mut stack = vec![(tree_root, Vec::new(), stat.st_dev)];
    while let Some((id, path, device)) = stack.pop() {
        if watch().is_break() {
            return Err(FolderError::Cancelled);
        }
        walk.folder(id, &path, device, &mut stack)?;
    }
    Ok(Walked {
        folder: walk.root,
        entries: walk.entries,
        dropped: walk.dropped,
    })
}

struct Walk<'a> {
    root: OwnedFd,
    tree: &'a mut Tree,
    /// Files with several names, by device and inode number.
    links: HashMap<(u64, u64), NodeId>,
    entries: u64,
    dropped: u64,
}

type Stack = Vec<(NodeId, Vec<u8>, u64)>;

impl Walk<'_> {
    fn folder(
        &mut self,
        id: NodeId,
        path: &[u8],
        device: u64,
        stack: &mut Stack,
    ) -> Result<(), FolderError> {
        let folder = self.open(path).map_err(|error| failed(path, error))?;
        let stat = rustix::fs::fstat(&folder).map_err(|error| failed(path, error))?;
        if stat.st_dev != device || path.is_empty() {
            let system = rustix::fs::fstatfs(&folder).map_err(|error| failed(path, error))?;
            if VIRTUAL_FILE_SYSTEMS.contains(&(system.f_type as i64)) {
                return Err(FolderError::Mounted(lossy(path)));
            }
        }
        let entries = Dir::read_from(&folder).map_err(|error| failed(path, error))?;
        for entry in entries {
            let entry = entry.map_err(|error| failed(path, error))?;
            let name = entry.file_name().to_bytes();
            if name == b"." || name == b".." {
                continue;
            }
            let mut below = path.to_vec();
            if !below.is_empty() {
                below.push(b'/');
            }
            below.extend_from_slice(name);
            self.entry(id, &folder, name, below, stat.st_dev, stack)?;
        }
        Ok(())
    }

    fn entry(
        &mut self,
        parent: NodeId,
        folder: &OwnedFd,
        name: &[u8],
        path: Vec<u8>,
        device: u64,
        stack: &mut Stack,
    ) -> Result<(), FolderError> {
        let named = |source| FolderError::Name {
            path: lossy(&path),
            source,
        };
        if path.len() > MAX_PATH {
            return Err(named(NameError::TooLong));
        }
        let stat = rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|error| failed(&path, error))?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        if kind == FileType::Socket {
            return Ok(());
        }
        self.entries += 1;
        let inode = (stat.st_dev, stat.st_ino);
        if let Some(id) = self.links.get(&inode) {
            return self.tree.link(parent, name, *id).map_err(named);
        }
        let (major, minor) = (
            rustix::fs::major(stat.st_rdev),
            rustix::fs::minor(stat.st_rdev),
        );
        let node = match kind {
            FileType::RegularFile => Kind::File(self.file(folder, name, &path, &stat)?),
            FileType::Directory => Kind::folder(),
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(folder, name, Vec::new())
                    .map_err(|error| failed(&path, error))?;
                Kind::Symlink(target.into_bytes().into())
            }
            FileType::CharacterDevice => Kind::CharDevice(major, minor),
            FileType::BlockDevice => Kind::BlockDevice(major, minor),
            _ => Kind::Fifo,
        };
        let attributes = self.attributes(&path, &stat, &proc_path(folder, name))?;
        let xattrs = attributes.xattrs.iter();
        let bytes: usize = xattrs
            .map(|(name, value)| name.len() + value.len() + 100)
            .sum();
        let weight = bytes as u64 + crate::tree::weight(&node);
        self.tree.charge_bytes(weight).map_err(named)?;
        let id = self
            .tree
            .add_child(parent, name, node, attributes)
            .map_err(named)?;
        if kind == FileType::Directory {
            stack.push((id, path, device));
        } else if stat.st_nlink > 1 {
            self.links.insert(inode, id);
        }
        Ok(())
    }

    fn file(
        &self,
        folder: &OwnedFd,
        name: &[u8],
        path: &[u8],
        stat: &Stat,
    ) -> Result<Content, FolderError> {
        let size = stat.st_size as u64;
        let holes = (stat.st_blocks as u64).saturating_mul(512) < size;
        let pieces = if holes {
            pieces(folder, name, size).map_err(|error| failed(path, error))?
        } else {
            vec![piece(0, size)]
        };
        Ok(Content {
            size,
            pieces: pieces.into_iter().filter(|piece| piece.len > 0).collect(),
            path: Some(Box::new(FolderFile {
                path: path.to_vec(),
                inode: stat.st_ino,
                changed: (stat.st_ctime, stat.st_ctime_nsec as i64),
            })),
        })
    }

    fn open(&self, path: &[u8]) -> Result<OwnedFd, Errno> {
        let path = if path.is_empty() { b"." } else { path };
        rustix::fs::openat2(
            &self.root,
            path,
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
            Mode::empty(),
            ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS,
        )
    }

    fn attributes(
        &mut self,
        path: &[u8],
        stat: &Stat,
        place: &[u8],
    ) -> Result<Attributes, FolderError> {
        let mut xattrs = BTreeMap::new();
        for name in names(place).map_err(|error| failed(path, error))? {
            if crate::xattrs::is_storable(&name) {
                let value = value(place, &name).map_err(|error| failed(path, error))?;
                xattrs.insert(name, value);
            } else {
                self.dropped += 1;
            }
        }
        Ok(Attributes {
            mode: (stat.st_mode & 0o7777) as u16,
            uid: stat.st_uid,
            gid: stat.st_gid,
            mtime: u64::try_from(stat.st_mtime).unwrap_or(0),
            xattrs,
        })
    }
}

/// A path for calls that take no folder descriptor: a name in an open folder. The caller must not
/// follow the name if it is a link.
fn proc_path(folder: &OwnedFd, name: &[u8]) -> Vec<u8> {
    let mut path = format!("/proc/self/fd/{}/", folder.as_fd().as_raw_fd()).into_bytes();
    path.extend_from_slice(name);
    path
}

fn names(place: &[u8]) -> Result<Vec<Vec<u8>>, Errno> {
    let mut room = vec![0; MAX_XATTR_LIST];
    let length = match rustix::fs::llistxattr(place, &mut room[..]) {
        Ok(length) => length,
        Err(Errno::OPNOTSUPP) => 0,
        Err(error) => return Err(error),
    };
    let names = room[..length].split(|byte| *byte == 0);
    Ok(names
        .filter(|name| !name.is_empty())
        .map(<[u8]>::to_vec)
        .collect())
}

fn value(place: &[u8], name: &[u8]) -> Result<Vec<u8>, Errno> {
    let mut room = vec![0; MAX_XATTR_LIST];
    let length = rustix::fs::lgetxattr(place, name, &mut room[..])?;
    room.truncate(length);
    Ok(room)
}

/// The parts of a file that are not holes.
fn pieces(folder: &OwnedFd, name: &[u8], size: u64) -> Result<Vec<Piece>, Errno> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = rustix::fs::openat(folder, name, flags, Mode::empty())?;
    let mut pieces = Vec::new();
    let mut at = 0;
    while at < size {
        let start = match rustix::fs::seek(&file, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(Errno::NXIO) => break,
            // The file system has no holes.
            Err(Errno::INVAL) => return Ok(vec![piece(0, size)]),
            Err(error) => return Err(error),
        };
        let end = rustix::fs::seek(&file, SeekFrom::Hole(start))?.min(size);
        if end <= start {
            break;
        }
        pieces.push(piece(start, end - start));
        at = end;
    }
    Ok(pieces)
}

fn piece(at: u64, len: u64) -> Piece {
    Piece {
        at,
        len,
        from: at,
        input: Input::Folder,
    }
}

fn failed(path: &[u8], error: Errno) -> FolderError {
    FolderError::Read {
        path: lossy(path),
        source: error.into(),
    }
}

fn lossy(path: &[u8]) -> String {
    String::from_utf8_lossy(path).into_owned()
}
