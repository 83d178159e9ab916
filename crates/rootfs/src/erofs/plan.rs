//! Plans the offset of every part of an image before anything is written.

use super::folder;
use super::format::{
    BLOCK_SIZE, HOLE, INODE_SIZE, MAX_TAIL_INLINE, ROOT_OFFSET, SLOT_SIZE, XATTR_HEADER_SIZE,
    xattr_body,
};
use crate::chunk_table;
use crate::tree::{Content, Input, Kind, Node, NodeId, Tree};
use thiserror::Error;

/// Why an image can't be planned.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The image would be larger than this limit, bytes.
    #[error("the image would be larger than its limit of {0} bytes")]
    OverLimit(u64),
    /// A file is larger than EROFS can describe, bytes.
    #[error("a file has {0} bytes, more than an image can contain")]
    FileTooLarge(u64),
    /// The root's attributes don't fit into the parent's first block.
    #[error("the root's attributes do not fit into the parent's first block")]
    RootTooLarge,
}

/// The image that a child is appended to.
#[derive(Debug, Clone, Copy)]
pub struct Parent {
    /// Number of its blocks.
    pub blocks: u32,
}

/// Placement of a node's bytes.
#[derive(Debug, Clone, Default)]
pub(super) enum Data {
    /// A run of blocks, then a tail beside the inode. Either may be empty.
    Blocks {
        /// Bytes in all.
        size: u64,
        /// The first of the whole blocks.
        first: u32,
        /// Bytes beside the inode.
        tail: u16,
        /// Whether the blocks must be written.
        new: bool,
    },
    /// Chunks of 2^`bits` blocks, each at its first block or a hole.
    Chunks {
        size: u64,
        bits: u32,
        table: Vec<u32>,
    },
    /// No data: a device, pipe or socket.
    #[default]
    None,
}

/// A node and its parent folder.
#[derive(Debug, Clone, Copy)]
pub(super) struct Visit {
    pub id: NodeId,
    pub parent: NodeId,
}

/// The plan of an image.
pub struct Plan<'a> {
    pub(super) tree: &'a Tree,
    /// Every node once, in the order of the inodes in the image.
    pub(super) order: Vec<Visit>,
    /// By node id: offset of the inode, bytes.
    pub(super) place: Vec<u64>,
    /// By node id; set only for nodes that are written.
    pub(super) data: Vec<Data>,
    /// By node id: link count.
    pub(super) links: Vec<u32>,
    /// By node id: whether the inode is written. It isn't if the parent's inode is used.
    pub(super) written: Vec<bool>,
    /// First block behind the root's inode, or behind the parent.
    pub(super) first_block: u32,
    /// First block of the inodes.
    pub(super) meta_block: u32,
    /// Number of blocks: the block behind the last.
    pub(super) end: u32,
    /// Whether the image is appended to a parent.
    pub(super) child: bool,
    next: u32,
    limit: u64,
}

impl<'a> Plan<'a> {
    /// Plans an image of `tree` with at most `limit` bytes, appended to `parent` if there is one.
    ///
    /// # Errors
    ///
    /// If the image would have more than `limit` bytes, a file is too large for EROFS, or the
    /// root's attributes do not fit into the parent's first block.
    pub fn new(tree: &'a Tree, parent: Option<Parent>, limit: u64) -> Result<Plan<'a>, PlanError> {
        let nodes = tree.nodes().len();
        let order = depth_first(tree);
        let mut plan = Plan {
            tree,
            links: count_links(tree, &order),
            order,
            place: vec![0; nodes],
            data: vec![Data::None; nodes],
            written: vec![true; nodes],
            first_block: 0,
            meta_block: 0,
            end: 0,
            child: parent.is_some(),
            next: 0,
            limit: limit.min(u64::from(u32::MAX - 1) * BLOCK_SIZE),
        };
        if let Some(parent) = parent {
            plan.reuse_unchanged_inodes();
            plan.next = parent.blocks;
        }
        plan.place_root()?;
        plan.place_files()?;
        plan.place_folders()?;
        plan.place_inodes()?;
        Ok(plan)
    }

    /// Size of the image, bytes.
    pub fn size(&self) -> u64 {
        u64::from(self.end) * BLOCK_SIZE
    }

    /// Number of files, folders, links and devices.
    pub fn nodes(&self) -> u64 {
        self.order.len() as u64
    }

    /// Number of the parent's blocks that nothing refers to any more.
    pub fn garbage(&self, parent: Parent) -> u32 {
        let mut live = Live::new(parent.blocks);
        live.add(0, BLOCK_SIZE);
        for visit in &self.order {
            let node = self.tree.node(visit.id);
            if let Some(origin) = node.origin.filter(|_| !self.written[visit.id.0]) {
                live.add(origin.nid * SLOT_SIZE, u64::from(origin.record));
                let (first, blocks) = origin.folder_blocks;
                live.add(
                    u64::from(first) * BLOCK_SIZE,
                    u64::from(blocks) * BLOCK_SIZE,
                );
                if let Kind::File(content) = &node.kind {
                    for piece in content.pieces.iter().filter(|p| p.input == Input::Parent) {
                        live.add(piece.from, piece.len);
                    }
                }
                continue;
            }
            match &self.data[visit.id.0] {
                Data::Blocks {
                    size,
                    first,
                    tail,
                    new: false,
                } => live.add(u64::from(*first) * BLOCK_SIZE, size - u64::from(*tail)),
                Data::Chunks { bits, table, .. } => {
                    for block in table.iter().filter(|block| **block < parent.blocks) {
                        live.add(u64::from(*block) * BLOCK_SIZE, BLOCK_SIZE << bits);
                    }
                }
                _ => {}
            }
        }
        live.dead()
    }

    /// Finds the nodes whose inodes in the parent are reused unchanged. A folder that moves must
    /// rewrite its subfolders, because their `..` holds its number.
    fn reuse_unchanged_inodes(&mut self) {
        let mut dirty = vec![true; self.tree.nodes().len()];
        for visit in self.order.iter().rev() {
            let node = self.tree.node(visit.id);
            let same = node
                .origin
                .is_some_and(|origin| origin.links == self.links[visit.id.0]);
            let inside = match &node.kind {
                Kind::Folder(children) => children.values().any(|name| dirty[name.id.0]),
                _ => false,
            };
            dirty[visit.id.0] = !same || inside;
        }
        let root = self.tree.root();
        for visit in &self.order {
            let node = self.tree.node(visit.id);
            let moved = matches!(node.kind, Kind::Folder(_))
                && visit.parent != root
                && self.written[visit.parent.0];
            let written = visit.id == root || dirty[visit.id.0] || moved;
            self.written[visit.id.0] = written;
            if let Some(origin) = node.origin.filter(|_| !written) {
                self.place[visit.id.0] = origin.nid * SLOT_SIZE;
            }
        }
    }

    /// Places the root right behind the superblock.
    fn place_root(&mut self) -> Result<(), PlanError> {
        let root = self.tree.root();
        self.place[root.0] = ROOT_OFFSET;
        let end = ROOT_OFFSET + INODE_SIZE + xattr_len(self.tree.node(root));
        if self.child {
            if end > BLOCK_SIZE {
                return Err(PlanError::RootTooLarge);
            }
        } else {
            self.next = end.div_ceil(BLOCK_SIZE) as u32;
        }
        self.first_block = self.next;
        Ok(())
    }

    fn place_files(&mut self) -> Result<(), PlanError> {
        for index in 0..self.order.len() {
            let id = self.order[index].id;
            let node = self.tree.node(id);
            if !self.written[id.0] {
                continue;
            }
            self.data[id.0] = match &node.kind {
                Kind::File(content) => self.place_file(content, xattr_len(node))?,
                Kind::Symlink(target) => self.place_run(target.len() as u64, xattr_len(node))?,
                _ => Data::None,
            };
        }
        Ok(())
    }

    fn place_file(&mut self, content: &Content, xattrs: u64) -> Result<Data, PlanError> {
        let size = content.size;
        let shared = self.child
            && content
                .pieces
                .iter()
                .any(|piece| piece.input == Input::Parent);
        let needs_table = chunk_table::needs_table(size, content.data_ranges());
        if !shared && !needs_table.ok_or(PlanError::FileTooLarge(size))? {
            return self.place_run(size, xattrs);
        }
        if shared && let Some(data) = shared_run(content, xattrs) {
            return Ok(data);
        }
        self.place_chunks(content, shared)
    }

    /// Places new bytes in a run of blocks.
    fn place_run(&mut self, size: u64, xattrs: u64) -> Result<Data, PlanError> {
        let tail = tail_beside_inode(size, xattrs);
        let first = self.reserve((size - tail).div_ceil(BLOCK_SIZE))?;
        Ok(Data::Blocks {
            size,
            first,
            tail: tail as u16,
            new: true,
        })
    }

    fn place_chunks(&mut self, content: &Content, shared: bool) -> Result<Data, PlanError> {
        let size = content.size;
        let bits = chunk_table::chunk_bits(size).ok_or(PlanError::FileTooLarge(size))?;
        let chunk = BLOCK_SIZE << bits;
        let mut table = Vec::with_capacity(size.div_ceil(chunk) as usize);
        let mut pieces = &content.pieces[..];
        for index in 0..size.div_ceil(chunk) {
            let start = index * chunk;
            let end = (start + chunk).min(size);
            while let Some((piece, rest)) = pieces.split_first()
                && piece.at + piece.len <= start
            {
                pieces = rest;
            }
            let block = match pieces.first() {
                Some(piece) if piece.at < end => {
                    let whole = piece.at <= start && piece.at + piece.len >= end;
                    let from = (piece.from + start).wrapping_sub(piece.at);
                    let serves = shared && piece.input == Input::Parent && whole;
                    if serves && from % BLOCK_SIZE == 0 {
                        (from / BLOCK_SIZE) as u32
                    } else {
                        self.reserve((end - start).div_ceil(BLOCK_SIZE))?
                    }
                }
                _ => HOLE,
            };
            table.push(block);
        }
        Ok(Data::Chunks { size, bits, table })
    }

    fn place_folders(&mut self) -> Result<(), PlanError> {
        for index in 0..self.order.len() {
            let id = self.order[index].id;
            let node = self.tree.node(id);
            if !matches!(node.kind, Kind::Folder(_)) || !self.written[id.0] {
                continue;
            }
            let (blocks, last) = folder::measure(self.tree, id);
            let beside = if id == self.tree.root() {
                BLOCK_SIZE.saturating_sub(ROOT_OFFSET + INODE_SIZE)
            } else {
                MAX_TAIL_INLINE
            };
            let inline = last + xattr_len(node) <= beside;
            self.data[id.0] = Data::Blocks {
                size: (blocks - 1) * BLOCK_SIZE + last,
                first: self.reserve(if inline { blocks - 1 } else { blocks })?,
                tail: if inline { last as u16 } else { 0 },
                new: true,
            };
        }
        Ok(())
    }

    fn place_inodes(&mut self) -> Result<(), PlanError> {
        self.meta_block = self.next;
        let mut at = u64::from(self.next) * BLOCK_SIZE;
        // fsck.erofs 1.5 reads the header of an inode's attributes although there are none.
        let mut header_end = at;
        for visit in &self.order {
            let id = visit.id;
            if id == self.tree.root() || !self.written[id.0] {
                continue;
            }
            let inode = INODE_SIZE + xattr_len(self.tree.node(id));
            let (tail, table) = match &self.data[id.0] {
                Data::Blocks { tail, .. } => (u64::from(*tail), 0),
                Data::Chunks { table, .. } => (0, 4 * table.len() as u64),
                Data::None => (0, 0),
            };
            // A tail must be in one block with its inode, and an inode must be in one block.
            // Attributes and chunk tables may cross blocks.
            let left = BLOCK_SIZE - at % BLOCK_SIZE;
            if (tail > 0 && inode + tail > left) || INODE_SIZE > left {
                at += left;
            }
            self.place[id.0] = at;
            header_end = at + INODE_SIZE + XATTR_HEADER_SIZE as u64;
            at = (at + inode + tail + table).next_multiple_of(SLOT_SIZE);
        }
        let blocks = at.max(header_end).div_ceil(BLOCK_SIZE) - u64::from(self.meta_block);
        self.reserve(blocks)?;
        self.end = self.next;
        Ok(())
    }

    fn reserve(&mut self, blocks: u64) -> Result<u32, PlanError> {
        let first = self.next;
        let end = u64::from(first)
            .checked_add(blocks)
            .filter(|end| *end <= self.limit / BLOCK_SIZE)
            .ok_or(PlanError::OverLimit(self.limit))?;
        self.next = end as u32;
        Ok(first)
    }
}

/// The run of blocks in the parent, if the content is unchanged.
fn shared_run(content: &Content, xattrs: u64) -> Option<Data> {
    let size = content.size;
    let tail = tail_beside_inode(size, xattrs);
    let in_blocks = size - tail;
    let row = |first| Data::Blocks {
        size,
        first,
        tail: tail as u16,
        new: false,
    };
    if in_blocks == 0 {
        return Some(row(0));
    }
    let piece = content.pieces.first()?;
    let serves = piece.input == Input::Parent
        && piece.at == 0
        && piece.len >= in_blocks
        && piece.from % BLOCK_SIZE == 0;
    serves.then(|| row((piece.from / BLOCK_SIZE) as u32))
}

/// Number of a file's last bytes that are stored beside its inode.
fn tail_beside_inode(size: u64, xattrs: u64) -> u64 {
    let tail = size % BLOCK_SIZE;
    if tail + xattrs <= MAX_TAIL_INLINE {
        tail
    } else {
        0
    }
}

pub(super) fn xattr_len(node: &Node) -> u64 {
    xattr_body(node.attributes.xattrs.iter()).len() as u64
}

/// Every node once, a folder before its entries, depth first: files of one folder are then
/// neighbours, and programs tend to read them together.
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
            stack.extend(children.values().rev().map(|name| Visit {
                id: name.id,
                parent: visit.id,
            }));
        }
        order.push(visit);
    }
    order
}

/// Link count of each node; a folder's own `.` and its subfolders' `..` count.
fn count_links(tree: &Tree, order: &[Visit]) -> Vec<u32> {
    let mut links = vec![0u32; tree.nodes().len()];
    links[tree.root().0] = 2;
    for visit in order {
        let Kind::Folder(children) = &tree.node(visit.id).kind else {
            continue;
        };
        for name in children.values() {
            if matches!(tree.node(name.id).kind, Kind::Folder(_)) {
                links[name.id.0] = links[name.id.0].saturating_add(2);
                links[visit.id.0] = links[visit.id.0].saturating_add(1);
            } else {
                links[name.id.0] = links[name.id.0].saturating_add(1);
            }
        }
    }
    links
}

/// The set of the parent's blocks that are in use.
struct Live {
    bits: Vec<u64>,
    blocks: u32,
}

impl Live {
    fn new(blocks: u32) -> Live {
        Live {
            bits: vec![0; (blocks as usize).div_ceil(64)],
            blocks,
        }
    }

    fn add(&mut self, at: u64, len: u64) {
        if len == 0 {
            return;
        }
        let last = (at + len).div_ceil(BLOCK_SIZE).min(u64::from(self.blocks));
        for block in at / BLOCK_SIZE..last {
            self.bits[(block / 64) as usize] |= 1 << (block % 64);
        }
    }

    fn dead(&self) -> u32 {
        let live: u32 = self.bits.iter().map(|word| word.count_ones()).sum();
        self.blocks - live
    }
}
