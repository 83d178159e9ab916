//! What a name refers to: a file, folder, link or device, with its attributes.

use super::NodeId;
use std::collections::BTreeMap;
use std::ops::Range;

/// Owner, permissions and time of an entry.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Attributes {
    /// Permission bits, 07777.
    pub mode: u16,
    /// Owner's user id.
    pub uid: u32,
    /// Owner's group id.
    pub gid: u32,
    /// Modification time, seconds since 1970.
    pub mtime: u64,
    /// Extended attributes by full name (`security.capability`).
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// A run of a file's bytes; bytes between runs are zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Offset in the file, bytes.
    pub at: u64,
    /// Length, bytes; not 0.
    pub len: u64,
    /// Offset in the input, bytes.
    pub from: u64,
    /// The input.
    pub input: Input,
}

/// Where the bytes of a piece are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Input {
    /// One of the files being imported, by number.
    File(u32),
    /// The parent image.
    Parent,
    /// The file below the imported folder that [`Content::path`] names.
    Folder,
}

/// Location of a regular file's bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Content {
    /// Size of the file, bytes.
    pub size: u64,
    /// Its runs, in order, without overlap.
    pub pieces: Box<[Piece]>,
    /// The file in the imported folder, for [`Input::Folder`].
    pub path: Option<Box<FolderFile>>,
}

impl Content {
    /// Ranges of the file that are not holes.
    pub(crate) fn data_ranges(&self) -> impl Iterator<Item = Range<u64>> {
        self.pieces
            .iter()
            .map(|piece| piece.at..piece.at + piece.len)
    }
}

/// A file in an imported folder, as it was when it was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FolderFile {
    /// Its path below the folder.
    pub path: Vec<u8>,
    /// Its inode number.
    pub inode: u64,
    /// Its ctime, seconds and nanoseconds.
    pub changed: (i64, i64),
}

/// Type of an entry, with its data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// A folder and its entries by name.
    Folder(BTreeMap<Box<[u8]>, Name>),
    /// A regular file.
    File(Content),
    /// A symbolic link to this target.
    Symlink(Box<[u8]>),
    /// A character device, major and minor.
    CharDevice(u32, u32),
    /// A block device, major and minor.
    BlockDevice(u32, u32),
    /// A named pipe.
    Fifo,
    /// A socket.
    Socket,
}

impl Kind {
    /// A folder without entries.
    pub fn folder() -> Kind {
        Kind::Folder(BTreeMap::new())
    }

    pub(super) fn is_folder(&self) -> bool {
        matches!(self, Kind::Folder(_))
    }
}

/// A name in a folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Name {
    /// The node it refers to.
    pub id: NodeId,
    /// The last layer that has the name.
    pub(super) layer: u32,
}

/// A file, folder, link or device.
#[derive(Debug, Clone)]
pub struct Node {
    /// Its type and data.
    pub kind: Kind,
    /// Owner, permissions, time and extended attributes.
    pub attributes: Attributes,
    /// The layer that set the attributes.
    pub(super) layer: u32,
    /// Its inode in the parent image, if it is unchanged.
    pub origin: Option<Origin>,
    /// The node of the parent image that had this name before.
    pub replaced: Option<NodeId>,
}

/// Location of an inode in a parent image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Origin {
    /// Its inode number.
    pub nid: u64,
    /// Its link count there.
    pub links: u32,
    /// Bytes of the inode, its attributes and the data beside it.
    pub record: u32,
    /// First block and number of blocks of a folder's entries.
    pub folder_blocks: (u32, u32),
}
