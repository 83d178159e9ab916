//! Directory blocks of a folder.

use super::format::{BLOCK_SIZE, DIRENT_SIZE, dirent};
use crate::tree::{Kind, NodeId, Tree};

/// Divides a folder's names, with `.` and `..`, into blocks. Calls `block` with each block's names
/// and its bytes in use.
pub(super) fn cut<'a>(
    tree: &'a Tree,
    own: NodeId,
    parent: NodeId,
    mut block: impl FnMut(&[(&'a [u8], NodeId)], usize),
) {
    let Kind::Folder(children) = &tree.node(own).kind else {
        return;
    };
    let mut names: Vec<(&[u8], NodeId)> = Vec::with_capacity(children.len() + 2);
    names.push((b".", own));
    names.push((b"..", parent));
    names.extend(children.iter().map(|(name, child)| (&**name, child.id)));
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

/// Number of blocks of a folder, and the bytes in use of the last one.
pub(super) fn measure(tree: &Tree, own: NodeId) -> (u64, u64) {
    let (mut blocks, mut last) = (0, 0);
    cut(tree, own, own, |_, used| {
        blocks += 1;
        last = used as u64;
    });
    (blocks, last)
}

/// A folder's directory blocks; the last one is cut after its bytes in use.
pub(super) fn bytes(
    tree: &Tree,
    own: NodeId,
    parent: NodeId,
    nid: impl Fn(NodeId) -> u64,
) -> Vec<u8> {
    let mut out = Vec::new();
    cut(tree, own, parent, |names, _| {
        out.resize(out.len().next_multiple_of(BLOCK_SIZE as usize), 0);
        let mut name_offset = names.len() * DIRENT_SIZE;
        for (name, id) in names {
            let file_type = file_type(&tree.node(*id).kind);
            out.extend_from_slice(&dirent(nid(*id), name_offset as u16, file_type));
            name_offset += name.len();
        }
        for (name, _) in names {
            out.extend_from_slice(name);
        }
    });
    out
}

/// Type in a directory entry (Linux `fs/fs_types.c`).
pub(super) fn file_type(kind: &Kind) -> u8 {
    match kind {
        Kind::File(_) => 1,
        Kind::Folder(_) => 2,
        Kind::CharDevice(..) => 3,
        Kind::BlockDevice(..) => 4,
        Kind::Fifo => 5,
        Kind::Socket => 6,
        Kind::Symlink(_) => 7,
    }
}

/// Type bits of `st_mode`.
pub(super) fn type_bits(kind: &Kind) -> u16 {
    match kind {
        Kind::Fifo => 0o010_000,
        Kind::CharDevice(..) => 0o020_000,
        Kind::Folder(_) => 0o040_000,
        Kind::BlockDevice(..) => 0o060_000,
        Kind::File(_) => 0o100_000,
        Kind::Symlink(_) => 0o120_000,
        Kind::Socket => 0o140_000,
    }
}
