//! Places and writes folders, inodes and the superblock.

use super::contents::{ContentWriter, WriteError};
use super::format::{
    BLOCK_SIZE, DIRENT_SIZE, INODE_SIZE, Inode, Layout, MAX_TAIL_INLINE, SLOT_SIZE,
    SUPERBLOCK_OFFSET, device_number, dirent, superblock, xattr_body, xattr_count,
};
use crate::tree::{Content, Kind, Node, NodeId, Tree};

/// Writes everything but file contents; returns the image's size in bytes.
pub fn finish(tree: &Tree, mut contents: ContentWriter) -> Result<u64, WriteError> {
    let order = depth_first(tree);
    let folders = place_folders(tree, &order, &mut contents)?;
    let places = place_inodes(tree, &order, &folders);
    let meta_block = contents.reserve(places.bytes.div_ceil(BLOCK_SIZE))?;
    let end = contents.reserve(0)?;

    write_inodes(tree, &order, &folders, &places, meta_block, &contents)?;
    let root_nid = (places.offset[tree.root().0] / SLOT_SIZE) as u16;
    let block = superblock(root_nid, order.len() as u64, end, meta_block);
    contents.write_image(&block, SUPERBLOCK_OFFSET)?;
    let size = u64::from(end) * BLOCK_SIZE;
    contents.set_len(size)?;
    Ok(size)
}

/// A node and its parent folder.
struct Visit {
    id: NodeId,
    parent: NodeId,
}

/// Every node once, folders before what they hold, neighbours side by side:
/// what a program reads together lies together.
fn depth_first(tree: &Tree) -> Vec<Visit> {
    let mut seen = vec![false; tree.nodes().len()];
    let mut order = Vec::with_capacity(seen.len());
    let mut stack = vec![Visit {
        id: tree.root(),
        parent: tree.root(),
    }];
    while let Some(visit) = stack.pop() {
        if std::mem::replace(&mut seen[visit.id.0], true) {
            continue;
        }
        if let Kind::Folder(children) = &tree.node(visit.id).kind {
            stack.extend(children.values().rev().map(|id| Visit {
                id: *id,
                parent: visit.id,
            }));
        }
        order.push(visit);
    }
    order
}

/// Cuts a folder's names, `.` and `..` among them, into blocks. Calls `block`
/// with each block's names and its bytes in use.
fn folder_blocks<'a>(
    node: &'a Node,
    own: NodeId,
    parent: NodeId,
    mut block: impl FnMut(&[(&'a [u8], NodeId)], usize),
) {
    let Kind::Folder(children) = &node.kind else {
        return;
    };
    let mut names: Vec<(&[u8], NodeId)> = Vec::with_capacity(children.len() + 2);
    names.push((b".", own));
    names.push((b"..", parent));
    names.extend(children.iter().map(|(name, id)| (&**name, *id)));
    names.sort_unstable_by_key(|(name, _)| *name);
    let (mut start, mut used) = (0, 0);
    for (index, (name, _)) in names.iter().enumerate() {
        let need = DIRENT_SIZE + name.len();
        if used + need > BLOCK_SIZE as usize {
            block(&names[start..index], used);
            (start, used) = (index, 0);
        }
        used += need;
    }
    block(&names[start..], used);
}

/// Where folders' entries go, by node id: the same shape as a file's content,
/// the tail still to be made.
fn place_folders(
    tree: &Tree,
    order: &[Visit],
    contents: &mut ContentWriter,
) -> Result<Vec<Content>, WriteError> {
    let mut placed = vec![Content::default(); tree.nodes().len()];
    for visit in order {
        let node = tree.node(visit.id);
        if !matches!(node.kind, Kind::Folder(_)) {
            continue;
        }
        let (mut blocks, mut last) = (0u64, 0);
        folder_blocks(node, visit.id, visit.parent, |_, used| {
            blocks += 1;
            last = used as u64;
        });
        let inline = last + xattr_len(node) <= MAX_TAIL_INLINE;
        let whole = if inline { blocks - 1 } else { blocks };
        placed[visit.id.0] = Content {
            size: (blocks - 1) * BLOCK_SIZE + last,
            first_block: contents.reserve(whole)?,
            tail_offset: 0,
            tail_len: if inline { last as u16 } else { 0 },
        };
    }
    Ok(placed)
}

fn xattr_len(node: &Node) -> u64 {
    xattr_body(node.attributes.xattrs.iter()).len() as u64
}

/// Offsets of inodes in the metadata area, by node id, and its length.
struct Places {
    offset: Vec<u64>,
    bytes: u64,
}

fn place_inodes(tree: &Tree, order: &[Visit], folders: &[Content]) -> Places {
    let mut offset = vec![0; tree.nodes().len()];
    let mut at = 0u64;
    for visit in order {
        let node = tree.node(visit.id);
        let tail = content_of(node, &folders[visit.id.0]).map_or(0, |content| content.tail_len);
        let size = INODE_SIZE + xattr_len(node) + u64::from(tail);
        // A tail must lie in one block with its inode; attributes alone may span.
        let left = BLOCK_SIZE - at % BLOCK_SIZE;
        if tail > 0 && size > left {
            at += left;
        }
        offset[visit.id.0] = at;
        at = (at + size).next_multiple_of(SLOT_SIZE);
    }
    Places { offset, bytes: at }
}

fn content_of<'a>(node: &'a Node, folder: &'a Content) -> Option<&'a Content> {
    match &node.kind {
        Kind::Folder(_) => Some(folder),
        Kind::File(content) | Kind::Symlink(content) => Some(content),
        _ => None,
    }
}

fn write_inodes(
    tree: &Tree,
    order: &[Visit],
    folders: &[Content],
    places: &Places,
    meta_block: u32,
    contents: &ContentWriter,
) -> Result<(), WriteError> {
    let nid = |id: NodeId| places.offset[id.0] / SLOT_SIZE;
    let mut record = Vec::new();
    for (index, visit) in order.iter().enumerate() {
        let node = tree.node(visit.id);
        let content = content_of(node, &folders[visit.id.0]);
        let xattrs = xattr_body(node.attributes.xattrs.iter());
        record.clear();
        record.extend_from_slice(&inode(node, content, index, xattrs.len()).to_bytes());
        record.extend_from_slice(&xattrs);
        if matches!(node.kind, Kind::Folder(_)) {
            let tail = write_folder(tree, visit, &folders[visit.id.0], nid, contents)?;
            record.extend_from_slice(&tail);
        } else if let Some(content) = content {
            contents.read_tail(content, &mut record)?;
        }
        let at = u64::from(meta_block) * BLOCK_SIZE + places.offset[visit.id.0];
        contents.write_image(&record, at)?;
    }
    Ok(())
}

fn inode(node: &Node, content: Option<&Content>, index: usize, xattr_bytes: usize) -> Inode {
    let union = match (&node.kind, content) {
        (Kind::CharDevice(major, minor) | Kind::BlockDevice(major, minor), _) => {
            device_number(*major, *minor)
        }
        (_, Some(content)) => content.first_block,
        _ => 0,
    };
    Inode {
        layout: match content {
            Some(content) if content.tail_len > 0 => Layout::Inline,
            _ => Layout::Plain,
        },
        xattr_count: xattr_count(xattr_bytes),
        mode: type_bits(&node.kind) | node.attributes.mode,
        size: content.map_or(0, |content| content.size),
        union,
        number: index as u32 + 1,
        uid: node.attributes.uid,
        gid: node.attributes.gid,
        mtime: node.attributes.mtime,
        links: node.links,
    }
}

/// Writes a folder's whole blocks and returns its tail.
fn write_folder(
    tree: &Tree,
    visit: &Visit,
    place: &Content,
    nid: impl Fn(NodeId) -> u64,
    contents: &ContentWriter,
) -> Result<Vec<u8>, WriteError> {
    let mut blocks = Vec::new();
    folder_blocks(tree.node(visit.id), visit.id, visit.parent, |names, _| {
        let mut block = Vec::with_capacity(BLOCK_SIZE as usize);
        let mut name_offset = names.len() * DIRENT_SIZE;
        for (name, id) in names {
            let file_type = file_type(&tree.node(*id).kind);
            block.extend_from_slice(&dirent(nid(*id), name_offset as u16, file_type));
            name_offset += name.len();
        }
        for (name, _) in names {
            block.extend_from_slice(name);
        }
        blocks.push(block);
    });
    let tail = if place.tail_len > 0 {
        blocks.pop().unwrap_or_default()
    } else {
        Vec::new()
    };
    for (index, block) in blocks.iter().enumerate() {
        let at = (u64::from(place.first_block) + index as u64) * BLOCK_SIZE;
        contents.write_image(block, at)?;
    }
    Ok(tail)
}

/// The type bits of `st_mode`.
fn type_bits(kind: &Kind) -> u16 {
    match kind {
        Kind::Fifo => 0o010_000,
        Kind::CharDevice(..) => 0o020_000,
        Kind::Folder(_) => 0o040_000,
        Kind::BlockDevice(..) => 0o060_000,
        Kind::File(_) => 0o100_000,
        Kind::Symlink(_) => 0o120_000,
    }
}

/// The type in a directory entry (Linux `fs/fs_types.c`).
fn file_type(kind: &Kind) -> u8 {
    match kind {
        Kind::File(_) => 1,
        Kind::Folder(_) => 2,
        Kind::CharDevice(..) => 3,
        Kind::BlockDevice(..) => 4,
        Kind::Fifo => 5,
        Kind::Symlink(_) => 7,
    }
}
