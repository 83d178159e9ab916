//! Writes a planned image from front to back.

use super::folder;
use super::format::{
    BLOCK_SIZE, CHECKSUM_AT, HOLE, Inode, Layout, ROOT_OFFSET, SLOT_SIZE, SUPERBLOCK_OFFSET,
    checksum, device_number, superblock, xattr_body, xattr_count,
};
use super::inputs::{Bytes, InputError, Inputs};
use super::plan::{Data, Plan, Visit};
use crate::tree::{Kind, NodeId};
use std::fs::File;
use std::io;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use thiserror::Error;

/// Bytes collected for one write.
const STRIDE: usize = 1 << 20;

/// Why an image can't be written.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum WriteError {
    /// Writing to the host's file system failed.
    #[error("the image can't be written")]
    Io(#[from] io::Error),
    /// Contents could not be read.
    #[error(transparent)]
    Input(#[from] InputError),
    /// The watcher cancelled it.
    #[error("the import was cancelled")]
    Cancelled,
}

/// Writes the planned image into `image`: all of it, or for a child block 0 and everything behind
/// the parent. With `hashed`, returns the BLAKE3 of a whole image, `None` for a child. `watch` is
/// called with the number of bytes written.
///
/// # Errors
///
/// If contents can't be read, the image can't be written, or `watch` cancels it.
pub fn write(
    plan: &Plan<'_>,
    inputs: &Inputs,
    image: &File,
    hashed: bool,
    watch: &mut dyn FnMut(u64) -> ControlFlow<()>,
) -> Result<Option<blake3::Hash>, WriteError> {
    let head = head(plan, inputs)?;
    image.set_len(plan.size())?;
    let mut out = Out {
        image,
        at: 0,
        waiting: Vec::with_capacity(2 * STRIDE),
        hasher: (hashed && !plan.child).then(blake3::Hasher::new),
        watch,
    };
    if plan.child {
        image.write_all_at(&head, 0)?;
        out.at = u64::from(plan.first_block) * BLOCK_SIZE;
    } else {
        out.bytes(&head)?;
    }
    write_files(plan, inputs, &mut out)?;
    write_folders(plan, &mut out)?;
    write_inodes(plan, inputs, &mut out)?;
    out.fill_to(plan.size())?;
    out.flush()?;
    Ok(out.hasher.map(|hasher| hasher.finalize()))
}

/// Block 0, and the blocks behind it that the root's attributes take.
fn head(plan: &Plan<'_>, inputs: &Inputs) -> Result<Vec<u8>, WriteError> {
    let chunked = plan
        .data
        .iter()
        .any(|data| matches!(data, Data::Chunks { .. }));
    // Files of the parent may have chunk tables. The flag is harmless if there are none.
    let chunked = chunked || plan.child;
    let root = Visit {
        id: plan.tree.root(),
        parent: plan.tree.root(),
    };
    let mut head = vec![0; SUPERBLOCK_OFFSET as usize];
    head.extend_from_slice(&superblock(plan.nodes(), plan.end, chunked));
    debug_assert_eq!(head.len() as u64, ROOT_OFFSET);
    head.extend_from_slice(&record(plan, inputs, &root, 0)?);
    head.resize(head.len().next_multiple_of(BLOCK_SIZE as usize), 0);
    let sum = checksum(&head[SUPERBLOCK_OFFSET as usize..BLOCK_SIZE as usize]);
    let at = SUPERBLOCK_OFFSET as usize + CHECKSUM_AT;
    head[at..at + 4].copy_from_slice(&sum.to_le_bytes());
    Ok(head)
}

fn write_files(plan: &Plan<'_>, inputs: &Inputs, out: &mut Out<'_>) -> Result<(), WriteError> {
    let mut buffer = vec![0; STRIDE];
    for visit in plan.order.iter().filter(|visit| plan.written[visit.id.0]) {
        let data = &plan.data[visit.id.0];
        if let (Kind::Symlink(target), Data::Blocks { tail: 0, .. }) =
            (&plan.tree.node(visit.id).kind, data)
        {
            // The link's target is too long to be stored beside its inode.
            out.bytes(target)?;
            out.fill_block()?;
        }
        let Kind::File(content) = &plan.tree.node(visit.id).kind else {
            continue;
        };
        let ranges: Vec<_> = match data {
            Data::Blocks {
                size,
                tail,
                new: true,
                ..
            } => std::iter::once(0..size - u64::from(*tail)).collect(),
            Data::Chunks { size, bits, table } => (0u64..)
                .zip(table)
                .filter(|(_, block)| **block != HOLE && **block >= plan.first_block)
                .map(|(index, _)| {
                    let start = index * (BLOCK_SIZE << bits);
                    start..size.min(&(start + (BLOCK_SIZE << bits))).to_owned()
                })
                .collect(),
            _ => continue,
        };
        if ranges.iter().all(|range| range.is_empty()) {
            continue;
        }
        let opened = inputs.open(content)?;
        for range in ranges {
            opened.copy(range, &mut buffer, |bytes| match bytes {
                Bytes::Read(bytes) => out.bytes(bytes),
                Bytes::Zeros(count) => out.zeros(count),
            })?;
            out.fill_block()?;
        }
    }
    Ok(())
}

fn write_folders(plan: &Plan<'_>, out: &mut Out<'_>) -> Result<(), WriteError> {
    for visit in plan.order.iter().filter(|visit| plan.written[visit.id.0]) {
        if let (Kind::Folder(_), Data::Blocks { size, tail, .. }) =
            (&plan.tree.node(visit.id).kind, &plan.data[visit.id.0])
            && *size > u64::from(*tail)
        {
            let entries = entries(plan, visit);
            out.bytes(&entries[..entries.len() - usize::from(*tail)])?;
            out.fill_block()?;
        }
    }
    Ok(())
}

fn write_inodes(plan: &Plan<'_>, inputs: &Inputs, out: &mut Out<'_>) -> Result<(), WriteError> {
    let root = plan.tree.root();
    for (index, visit) in plan.order.iter().enumerate() {
        if visit.id == root || !plan.written[visit.id.0] {
            continue;
        }
        out.fill_to(plan.place[visit.id.0])?;
        out.bytes(&record(plan, inputs, visit, index)?)?;
    }
    Ok(())
}

fn entries(plan: &Plan<'_>, visit: &Visit) -> Vec<u8> {
    let nid = |id: NodeId| plan.place[id.0] / SLOT_SIZE;
    folder::bytes(plan.tree, visit.id, visit.parent, nid)
}

/// An inode, its attributes, and the tail or table beside it.
fn record(
    plan: &Plan<'_>,
    inputs: &Inputs,
    visit: &Visit,
    index: usize,
) -> Result<Vec<u8>, WriteError> {
    let node = plan.tree.node(visit.id);
    let data = &plan.data[visit.id.0];
    let xattrs = xattr_body(node.attributes.xattrs.iter());
    let (layout, size, union) = match (data, &node.kind) {
        (
            Data::Blocks {
                size, first, tail, ..
            },
            _,
        ) => match tail {
            0 => (Layout::Plain, *size, *first),
            _ => (Layout::Inline, *size, *first),
        },
        (Data::Chunks { size, bits, .. }, _) => (Layout::Chunks, *size, *bits),
        (Data::None, Kind::CharDevice(major, minor) | Kind::BlockDevice(major, minor)) => {
            (Layout::Plain, 0, device_number(*major, *minor))
        }
        (Data::None, _) => (Layout::Plain, 0, 0),
    };
    let inode = Inode {
        layout,
        xattr_count: xattr_count(xattrs.len()),
        mode: folder::type_bits(&node.kind) | node.attributes.mode,
        size,
        union,
        number: index as u32 + 1,
        uid: node.attributes.uid,
        gid: node.attributes.gid,
        mtime: node.attributes.mtime,
        links: plan.links[visit.id.0],
    };
    let mut record = inode.to_bytes().to_vec();
    record.extend_from_slice(&xattrs);
    match (data, &node.kind) {
        (Data::Chunks { table, .. }, _) => {
            record.extend(table.iter().flat_map(|block| block.to_le_bytes()));
        }
        (Data::Blocks { size, tail, .. }, Kind::File(content)) if *tail > 0 => {
            let mut buffer = [0; BLOCK_SIZE as usize];
            let range = size - u64::from(*tail)..*size;
            inputs.open(content)?.copy(range, &mut buffer, |bytes| {
                match bytes {
                    Bytes::Read(bytes) => record.extend_from_slice(bytes),
                    Bytes::Zeros(count) => record.resize(record.len() + count as usize, 0),
                }
                Ok::<_, InputError>(())
            })?;
        }
        (Data::Blocks { tail, .. }, Kind::Symlink(target)) => {
            record.extend_from_slice(&target[target.len() - usize::from(*tail)..]);
        }
        (Data::Blocks { tail, .. }, Kind::Folder(_)) if *tail > 0 => {
            let entries = entries(plan, visit);
            record.extend_from_slice(&entries[entries.len() - usize::from(*tail)..]);
        }
        _ => {}
    }
    Ok(record)
}

/// Writes the image in order; long runs of zeros become holes in the file.
struct Out<'a> {
    image: &'a File,
    /// Offset at which `waiting` is written.
    at: u64,
    waiting: Vec<u8>,
    hasher: Option<blake3::Hasher>,
    watch: &'a mut dyn FnMut(u64) -> ControlFlow<()>,
}

impl Out<'_> {
    fn position(&self) -> u64 {
        self.at + self.waiting.len() as u64
    }

    fn bytes(&mut self, bytes: &[u8]) -> Result<(), WriteError> {
        self.waiting.extend_from_slice(bytes);
        if self.waiting.len() >= STRIDE {
            self.flush()?;
        }
        Ok(())
    }

    fn zeros(&mut self, count: u64) -> Result<(), WriteError> {
        if count <= STRIDE as u64 {
            self.waiting.resize(self.waiting.len() + count as usize, 0);
            if self.waiting.len() >= STRIDE {
                self.flush()?;
            }
            return Ok(());
        }
        self.flush()?;
        self.at += count;
        if let Some(hasher) = &mut self.hasher {
            let zeros = vec![0; STRIDE];
            let mut left = count;
            while left > 0 {
                let most = left.min(STRIDE as u64);
                hasher.update(&zeros[..most as usize]);
                left -= most;
            }
        }
        Ok(())
    }

    fn fill_block(&mut self) -> Result<(), WriteError> {
        self.fill_to(self.position().next_multiple_of(BLOCK_SIZE))
    }

    fn fill_to(&mut self, at: u64) -> Result<(), WriteError> {
        debug_assert!(at >= self.position());
        self.zeros(at.saturating_sub(self.position()))
    }

    fn flush(&mut self) -> Result<(), WriteError> {
        let waiting = std::mem::take(&mut self.waiting);
        // Only long runs of zeros are left out: shorter holes save nothing on most file systems.
        let mut start = 0;
        while start < waiting.len() {
            let is_zero = |piece: &[u8]| piece.iter().all(|byte| *byte == 0);
            let pieces = waiting[start..].chunks(16 * BLOCK_SIZE as usize);
            let data: usize = pieces
                .take_while(|piece| !is_zero(piece))
                .map(<[u8]>::len)
                .sum();
            self.image
                .write_all_at(&waiting[start..start + data], self.at + start as u64)?;
            start += data;
            let pieces = waiting[start..].chunks(16 * BLOCK_SIZE as usize);
            start += pieces
                .take_while(|piece| is_zero(piece))
                .map(<[u8]>::len)
                .sum::<usize>();
        }
        if let Some(hasher) = &mut self.hasher {
            hasher.update(&waiting);
        }
        self.at += waiting.len() as u64;
        self.waiting = waiting;
        self.waiting.clear();
        match (self.watch)(self.at) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(WriteError::Cancelled),
        }
    }
}
