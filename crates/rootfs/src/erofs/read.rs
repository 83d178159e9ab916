//! Reads images of Jiffy's own format back into a tree.
//!
//! An image may come from anywhere, so everything is checked: every offset is within the image,
//! every folder has only one name, and every name is valid.

use super::folder::{file_type, type_bits};
use super::format::{
    BLOCK_SIZE, CHECKSUM_AT, COMPAT_CHECKSUM, DIRENT_SIZE, HOLE, INCOMPAT_CHUNKED_FILE, INODE_SIZE,
    Layout, MAGIC, MAX_CHUNK_BITS, MAX_CHUNKS, ROOT_OFFSET, SLOT_SIZE, SUPERBLOCK_OFFSET,
    VOLUME_NAME, XATTR_ENTRY_SIZE, XATTR_HEADER_SIZE, checksum, device_of, xattr_name,
};
use super::inputs::ReadAt;
use super::plan::Parent;
use crate::tree::{
    Attributes, Content, Input, Kind, MAX_NAME, MAX_PATH, NameError, Origin, Piece, Tree, weight,
};
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use thiserror::Error;

/// Why an image can't be read.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ReadError {
    /// It is not an EROFS image, or not one as Jiffy writes it.
    #[error("it is not an image made by Jiffy: {0}")]
    Foreign(&'static str),
    /// A value in it is invalid.
    #[error("it is damaged: {what} at byte {at}")]
    Damaged {
        /// Offset, bytes.
        at: u64,
        /// What is wrong.
        what: &'static str,
    },
    /// It has more entries or longer names than allowed.
    #[error(transparent)]
    Limit(#[from] NameError),
    /// Reading it failed.
    #[error("it can't be read")]
    Io(#[from] io::Error),
}

/// An image whose superblock was checked.
pub struct Readable {
    image: Arc<dyn ReadAt>,
    blocks: u32,
    root_at: u64,
    /// Offset of inode number 0, bytes.
    inodes_at: u64,
    whole_blocks: bool,
}

impl Readable {
    /// Opens an image and checks its superblock.
    ///
    /// # Errors
    ///
    /// If it can't be read, is not an image as Jiffy writes it, or its superblock is damaged.
    pub fn open(image: Arc<dyn ReadAt>) -> Result<Readable, ReadError> {
        let size = image.size()?;
        if size < BLOCK_SIZE {
            return Err(ReadError::Foreign("it is too small"));
        }
        let mut block = [0; (BLOCK_SIZE - SUPERBLOCK_OFFSET) as usize];
        image.read_exact_at(&mut block, SUPERBLOCK_OFFSET)?;
        let u16_at = |at: usize| u16::from_le_bytes([block[at], block[at + 1]]);
        let u32_at = |at: usize| u32::from(u16_at(at)) | u32::from(u16_at(at + 2)) << 16;
        if u32_at(0) != MAGIC {
            return Err(ReadError::Foreign("it is not an EROFS image"));
        }
        let sum = u32_at(CHECKSUM_AT);
        let mut zeroed = block;
        zeroed[CHECKSUM_AT..CHECKSUM_AT + 4].fill(0);
        if u32_at(8) & COMPAT_CHECKSUM == 0 {
            return Err(ReadError::Foreign("its superblock has no checksum"));
        }
        if checksum(&zeroed) != sum {
            let (at, what) = (SUPERBLOCK_OFFSET, "the superblock's checksum is wrong");
            return Err(ReadError::Damaged { at, what });
        }
        if u64::from(block[12]) != u64::from(BLOCK_SIZE.trailing_zeros()) || block[13] != 0 {
            return Err(ReadError::Foreign("its block size is not 4096 bytes"));
        }
        if u32_at(80) & !INCOMPAT_CHUNKED_FILE != 0 || u32_at(44) != 0 {
            return Err(ReadError::Foreign(
                "it has features that Jiffy does not use",
            ));
        }
        let blocks = u32_at(36);
        if u64::from(blocks) * BLOCK_SIZE > size || blocks == 0 {
            let (at, what) = (SUPERBLOCK_OFFSET, "it is truncated");
            return Err(ReadError::Damaged { at, what });
        }
        let inodes_at = u64::from(u32_at(40)) * BLOCK_SIZE;
        Ok(Readable {
            blocks,
            root_at: inodes_at + u64::from(u16_at(14)) * SLOT_SIZE,
            inodes_at,
            whole_blocks: u64::from(blocks) * BLOCK_SIZE == size && &block[64..80] == VOLUME_NAME,
            image,
        })
    }

    /// The image as a parent, if a child can be appended to it.
    pub fn as_parent(&self) -> Option<Parent> {
        let fits = self.whole_blocks && self.inodes_at == 0 && self.root_at == ROOT_OFFSET;
        fits.then_some(Parent {
            blocks: self.blocks,
        })
    }

    /// The image's bytes.
    pub fn image(&self) -> Arc<dyn ReadAt> {
        Arc::clone(&self.image)
    }

    /// Reads names and attributes into a tree; contents stay in the image ([`Input::Parent`]).
    ///
    /// # Errors
    ///
    /// If there are more than `max_entries` entries, their names and attributes take more than
    /// `max_bytes`, or the image can't be read or is damaged.
    pub fn tree(&self, max_entries: u64, max_bytes: u64) -> Result<Tree, ReadError> {
        let mut tree = Tree::new(max_entries, max_bytes);
        let mut known = HashMap::new();
        let root = self.inode(self.root_at, &mut tree)?;
        if root.kind != Kind::folder() {
            return Err(damaged(self.root_at, "the root is not a folder"));
        }
        known.insert(self.root_at, tree.root());
        let node = tree.node_mut(tree.root());
        (node.attributes, node.origin) = (root.attributes, Some(root.origin));
        let mut stack = vec![(tree.root(), root.entries, self.root_at, 0)];
        while let Some((folder, entries, at, path)) = stack.pop() {
            let origin = tree.node(folder).origin;
            for (name, nid, kind) in self.names(&entries, at)? {
                let length = path + 1 + name.len();
                if length > MAX_PATH {
                    return Err(damaged(at, "a path is too long"));
                }
                let place = self.place(nid, at)?;
                if let Some(id) = known.get(&place) {
                    let node = tree.node(*id);
                    if matches!(node.kind, Kind::Folder(_)) || kind != file_type(&node.kind) {
                        return Err(damaged(at, "a folder has more than one name"));
                    }
                    tree.link(folder, &name, *id)?;
                    continue;
                }
                let found = self.inode(place, &mut tree)?;
                if kind != file_type(&found.kind) {
                    return Err(damaged(
                        at,
                        "the type of a name differs from that of its inode",
                    ));
                }
                let id = tree.add_child(folder, &name, found.kind, found.attributes)?;
                tree.node_mut(id).origin = Some(found.origin);
                known.insert(place, id);
                if matches!(tree.node(id).kind, Kind::Folder(_)) {
                    stack.push((id, found.entries, place, length));
                }
            }
            // The children were added to read the folder, not to change it: it keeps its origin.
            tree.node_mut(folder).origin = origin;
        }
        Ok(tree)
    }

    /// Offset of the inode with that number; `from` is the folder that refers to it, for errors.
    fn place(&self, nid: u64, from: u64) -> Result<u64, ReadError> {
        nid.checked_mul(SLOT_SIZE)
            .and_then(|at| at.checked_add(self.inodes_at))
            .filter(|at| {
                at.checked_add(INODE_SIZE)
                    .is_some_and(|end| end <= self.end())
            })
            .ok_or(damaged(from, "an inode is beyond the end"))
    }

    fn end(&self) -> u64 {
        u64::from(self.blocks) * BLOCK_SIZE
    }

    fn bytes(&self, at: u64, len: u64) -> Result<Vec<u8>, ReadError> {
        if at.checked_add(len).is_none_or(|end| end > self.end()) {
            return Err(damaged(at, "a structure extends beyond the end"));
        }
        let mut bytes = vec![0; len as usize];
        self.image.read_exact_at(&mut bytes, at)?;
        Ok(bytes)
    }

    fn inode(&self, at: u64, tree: &mut Tree) -> Result<Found, ReadError> {
        let bytes = self.bytes(at, INODE_SIZE)?;
        let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let u32_at = |at: usize| u32::from(u16_at(at)) | u32::from(u16_at(at + 2)) << 16;
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        let layout = match u16_at(0) {
            0x1 => Layout::Plain,
            0x5 => Layout::Inline,
            0x9 => Layout::Chunks,
            _ => return Err(damaged(at, "an inode has a layout that Jiffy does not use")),
        };
        let xattr_bytes = match u16_at(2) {
            0 => 0,
            count => (XATTR_HEADER_SIZE + XATTR_ENTRY_SIZE * (usize::from(count) - 1)) as u64,
        };
        let mode = u16_at(4);
        let shape = Shape {
            at,
            layout,
            size: u64_at(8),
            union: u32_at(16),
            beside: at + INODE_SIZE + xattr_bytes,
        };
        tree.charge_bytes(3 * xattr_bytes)?;
        let attributes = Attributes {
            mode: mode & 0o7777,
            uid: u32_at(24),
            gid: u32_at(28),
            mtime: u64_at(32),
            xattrs: parse_xattrs(&self.bytes(at + INODE_SIZE, xattr_bytes)?)
                .ok_or(damaged(at, "an inode's attributes are invalid"))?,
        };
        let mut entries = Vec::new();
        let mut folder_blocks = (0, 0);
        let (content, beside) = self.content(&shape, tree)?;
        let kind = match mode & 0o170_000 {
            0o100_000 => Kind::File(content),
            0o040_000 => {
                tree.charge_bytes(content.size)?;
                entries = self.contents(&content)?;
                let in_blocks = match layout {
                    Layout::Plain => shape.size,
                    Layout::Inline => shape.size - beside,
                    Layout::Chunks => return Err(damaged(at, "a folder is stored in chunks")),
                };
                folder_blocks = (shape.union, in_blocks.div_ceil(BLOCK_SIZE) as u32);
                Kind::folder()
            }
            0o120_000 => {
                if shape.size == 0 || shape.size > MAX_PATH as u64 {
                    return Err(damaged(at, "a link's target has an invalid length"));
                }
                let target = self.contents(&content)?;
                if target.contains(&0) {
                    return Err(damaged(at, "a link's target contains a NUL byte"));
                }
                Kind::Symlink(target.into())
            }
            0o020_000 => Kind::CharDevice(device_of(shape.union).0, device_of(shape.union).1),
            0o060_000 => Kind::BlockDevice(device_of(shape.union).0, device_of(shape.union).1),
            0o010_000 => Kind::Fifo,
            0o140_000 => Kind::Socket,
            _ => return Err(damaged(at, "an inode has an unknown type")),
        };
        tree.charge_bytes(weight(&kind))?;
        debug_assert_eq!(mode & 0o170_000, type_bits(&kind));
        Ok(Found {
            kind,
            attributes,
            entries,
            origin: Origin {
                nid: (at - self.inodes_at) / SLOT_SIZE,
                links: u32_at(44),
                record: (INODE_SIZE + xattr_bytes + beside) as u32,
                folder_blocks,
            },
        })
    }

    /// The content of an inode, and how many of its bytes are beside the inode.
    fn content(&self, shape: &Shape, tree: &mut Tree) -> Result<(Content, u64), ReadError> {
        let size = shape.size;
        let row = |len: u64| -> Result<Piece, ReadError> {
            let from = u64::from(shape.union) * BLOCK_SIZE;
            if from.checked_add(len).is_none_or(|end| end > self.end()) {
                return Err(damaged(shape.at, "a file extends beyond the end"));
            }
            Ok(piece(0, len, from))
        };
        let mut pieces = Vec::new();
        let mut beside = 0;
        // For a device, the same field is its number, not a block.
        let plain = shape.layout == Layout::Plain;
        match shape.layout {
            _ if size == 0 && plain => {}
            Layout::Plain => pieces.push(row(size)?),
            Layout::Inline => {
                beside = size % BLOCK_SIZE;
                let whole = size - beside;
                let room = BLOCK_SIZE - shape.beside % BLOCK_SIZE;
                if beside == 0 || beside > room || shape.beside + beside > self.end() {
                    return Err(damaged(shape.at, "a file's tail crosses a block"));
                }
                if whole > 0 {
                    pieces.push(row(whole)?);
                }
                pieces.push(piece(whole, beside, shape.beside));
            }
            Layout::Chunks => beside = self.chunks(shape, tree, &mut pieces)?,
        }
        let content = Content {
            size,
            pieces: pieces.into(),
            path: None,
        };
        Ok((content, beside))
    }

    fn chunks(
        &self,
        shape: &Shape,
        tree: &mut Tree,
        pieces: &mut Vec<Piece>,
    ) -> Result<u64, ReadError> {
        let bits = shape.union;
        if bits > MAX_CHUNK_BITS {
            return Err(damaged(shape.at, "a file's chunks have an invalid size"));
        }
        let chunk = BLOCK_SIZE << bits;
        let count = shape.size.div_ceil(chunk);
        if count > MAX_CHUNKS {
            return Err(damaged(shape.at, "a file has too many chunks"));
        }
        tree.charge_bytes(count * 4)?;
        let table = self.bytes(shape.beside, count * 4)?;
        for (index, entry) in (0u64..).zip(table.chunks_exact(4)) {
            let block = u32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]);
            if block == HOLE {
                continue;
            }
            let at = index * chunk;
            let len = chunk.min(shape.size - at);
            let from = u64::from(block) * BLOCK_SIZE;
            if from + len > self.end() {
                return Err(damaged(shape.at, "a file extends beyond the end"));
            }
            match pieces.last_mut() {
                Some(last) if last.at + last.len == at && last.from + last.len == from => {
                    last.len += len;
                }
                _ => pieces.push(piece(at, len, from)),
            }
        }
        Ok(count * 4)
    }

    /// Reads all bytes of a folder or a symbolic link.
    fn contents(&self, content: &Content) -> Result<Vec<u8>, ReadError> {
        let mut bytes = Vec::new();
        for piece in &content.pieces {
            bytes.resize(piece.at as usize, 0);
            bytes.extend(self.bytes(piece.from, piece.len)?);
        }
        bytes.resize(content.size as usize, 0);
        Ok(bytes)
    }

    /// Parses a folder's names, inode numbers and types; `.` and `..` are left out.
    fn names(&self, entries: &[u8], at: u64) -> Result<Vec<(Vec<u8>, u64, u8)>, ReadError> {
        let invalid = || damaged(at, "a folder's entries are invalid");
        let mut names: Vec<(Vec<u8>, u64, u8)> = Vec::new();
        let mut dots = 0;
        let mut last: Vec<u8> = Vec::new();
        for block in entries.chunks(BLOCK_SIZE as usize) {
            let offset = |index: usize| -> Option<usize> {
                let entry = block.get(index * DIRENT_SIZE..(index + 1) * DIRENT_SIZE)?;
                Some(usize::from(u16::from_le_bytes([entry[8], entry[9]])))
            };
            let first = offset(0).ok_or_else(invalid)?;
            let count = first / DIRENT_SIZE;
            if first % DIRENT_SIZE != 0 || count == 0 || first > block.len() {
                return Err(invalid());
            }
            for index in 0..count {
                let entry = &block[index * DIRENT_SIZE..(index + 1) * DIRENT_SIZE];
                let start = offset(index).ok_or_else(invalid)?;
                let end = match index + 1 == count {
                    true => block.len(),
                    false => offset(index + 1).ok_or_else(invalid)?,
                };
                let name = block.get(start..end).ok_or_else(invalid)?;
                // Zeros follow the last name of a block, unless the block is the folder's last.
                let name = match name.iter().position(|byte| *byte == 0) {
                    Some(nul) if index + 1 == count => &name[..nul],
                    Some(_) => return Err(invalid()),
                    None => name,
                };
                let sorted = last.is_empty() || last.as_slice() < name;
                if name.is_empty() || name.len() > MAX_NAME || name.contains(&b'/') || !sorted {
                    return Err(invalid());
                }
                last = name.to_vec();
                let nid = entry[..8]
                    .iter()
                    .rev()
                    .fold(0, |nid, byte| nid << 8 | u64::from(*byte));
                match name {
                    b"." | b".." => dots += 1,
                    _ => names.push((name.to_vec(), nid, entry[10])),
                }
            }
        }
        if dots != 2 {
            return Err(invalid());
        }
        Ok(names)
    }
}

/// An inode's offset and data layout.
struct Shape {
    at: u64,
    layout: Layout,
    size: u64,
    union: u32,
    /// Offset of the end of the inode and its attributes.
    beside: u64,
}

/// A parsed inode.
struct Found {
    kind: Kind,
    attributes: Attributes,
    origin: Origin,
    /// The directory blocks, if it is a folder.
    entries: Vec<u8>,
}

fn piece(at: u64, len: u64, from: u64) -> Piece {
    Piece {
        at,
        len,
        from,
        input: Input::Parent,
    }
}

fn damaged(at: u64, what: &'static str) -> ReadError {
    ReadError::Damaged { at, what }
}

fn parse_xattrs(body: &[u8]) -> Option<std::collections::BTreeMap<Vec<u8>, Vec<u8>>> {
    let mut xattrs = std::collections::BTreeMap::new();
    if body.is_empty() {
        return Some(xattrs);
    }
    let (header, mut rest) = body.split_at_checked(XATTR_HEADER_SIZE)?;
    if header.iter().any(|byte| *byte != 0) {
        return None;
    }
    while !rest.is_empty() {
        let (entry, after) = rest.split_at_checked(XATTR_ENTRY_SIZE)?;
        let value_len = usize::from(u16::from_le_bytes([entry[2], entry[3]]));
        let (name, after) = after.split_at_checked(usize::from(entry[0]))?;
        let (value, _) = after.split_at_checked(value_len)?;
        let name = xattr_name(entry[1], name)?;
        if xattrs.insert(name, value.to_vec()).is_some() {
            return None;
        }
        let used = XATTR_ENTRY_SIZE + usize::from(entry[0]) + value_len;
        rest = rest.get(used.next_multiple_of(XATTR_ENTRY_SIZE)..)?;
    }
    Some(xattrs)
}

impl std::fmt::Debug for Readable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Readable")
            .field("blocks", &self.blocks)
            .finish_non_exhaustive()
    }
}
