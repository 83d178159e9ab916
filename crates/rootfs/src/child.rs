//! Child images: the parent's bytes at their offsets, and new bytes appended.

use crate::apply::Whiteouts;
use crate::config::ImageConfig;
use crate::erofs::{Inputs, Plan, ReadAt, Readable};
use crate::error::ImportError;
use crate::import::{Imported, Target, Watch, open_image, read_source, write};
use crate::layer::size_of;
use crate::limits::Limits;
use crate::scratch::Scratch;
use crate::source::Source;
use crate::tree::{Content, Kind, NodeId, Piece, Tree};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

/// Unit in which a changed file is compared and shares bytes with the parent's file.
const BLOCK: u64 = crate::erofs::BLOCK_SIZE;
const STRIDE: u64 = 64 * BLOCK;

/// A child image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Child {
    /// The image (its `config` is empty).
    pub image: Imported,
    /// Whether the image was written from scratch, because over half of it would have been garbage
    /// or because nothing can be appended to the parent. It then shares no bytes with the parent.
    pub rebuilt: bool,
    /// Bytes at its beginning that equal the parent's, except for the first block.
    pub shared: u64,
    /// Bytes that nothing in the image refers to any more.
    pub garbage: u64,
}

/// Applies `changes` (a layer with OCI or overlayfs whiteouts) to the image `parent` and writes the
/// result to `out`: the parent's bytes at their offsets, except for the first block, then the new
/// bytes. The parent's bytes are shared by reference where the file system can, else copied.
///
/// The image is written from scratch if over half of it would be garbage of its ancestors.
///
/// # Errors
///
/// If the parent is not an image of Jiffy, the changes can't be read or exceed `limits`, `out`
/// can't be written, or `watch` cancels it. Nothing is left behind.
pub fn child(
    parent: &Path,
    changes: Source,
    out: &Path,
    limits: &Limits,
    watch: Watch<'_>,
) -> Result<Child, ImportError> {
    let image = open_image(parent)?;
    let copy = |target: &File| copy(&File::open(parent)?, target);
    let target = Target::new(out)?;
    let to = To::of(&target);
    let mut made = append(&image, parent, changes, &to, limits, watch, &copy)?;
    target.publish()?;
    if made.image.digest.is_empty() {
        made.image.digest = digest_of(out)?;
    }
    Ok(made)
}

/// [`child`] for a parent that is only partly local. Writes the first block and the new bytes; the
/// rest of the parent's range in `out` is a hole. Reads only the parent's names and attributes, and
/// the contents of files that `changes` replaces. The digest is empty unless the image was written
/// from scratch.
///
/// # Errors
///
/// As for [`child`].
pub fn child_over(
    parent: Arc<dyn ReadAt>,
    changes: Source,
    out: &Path,
    limits: &Limits,
    watch: Watch<'_>,
) -> Result<Child, ImportError> {
    let name = Path::new("the parent");
    let image = Readable::open(parent).map_err(|source| ImportError::Image {
        path: name.to_owned(),
        source,
    })?;
    let target = Target::new(out)?;
    let to = To::of(&target);
    let made = append(&image, name, changes, &to, limits, watch, &|_| Ok(()))?;
    target.publish()?;
    Ok(made)
}

/// [`child`] into an empty file, which is not synced, with temporary files of the caller's choice.
/// `name` is the parent's, for messages. The digest is empty: it is left to those who own the file.
///
/// # Errors
///
/// As for [`child`]. What was written to `image` stays.
pub fn child_into(
    parent: Arc<File>,
    name: &Path,
    changes: Source,
    image: &File,
    scratch: Scratch,
    limits: &Limits,
    watch: Watch<'_>,
) -> Result<Child, ImportError> {
    let readable = Readable::open(parent.clone()).map_err(|source| ImportError::Image {
        path: name.to_owned(),
        source,
    })?;
    let to = To {
        image,
        scratch,
        hashed: false,
    };
    let copy = |target: &File| copy(&parent, target);
    append(&readable, name, changes, &to, limits, watch, &copy)
}

/// The files that a child is written with.
struct To<'a> {
    image: &'a File,
    scratch: Scratch,
    hashed: bool,
}

impl<'a> To<'a> {
    fn of(target: &'a Target<'_>) -> To<'a> {
        To {
            image: target.file(),
            scratch: target.scratch(),
            hashed: true,
        }
    }
}

fn append(
    image: &Readable,
    name: &Path,
    changes: Source,
    to: &To<'_>,
    limits: &Limits,
    watch: Watch<'_>,
    copy: &dyn Fn(&File) -> io::Result<()>,
) -> Result<Child, ImportError> {
    let mut tree = read_tree(image, name, limits)?;
    let mut inputs = Inputs {
        parent: Some(image.image()),
        ..Inputs::default()
    };
    let counts = read_source(
        changes.contents,
        Whiteouts::OciOrOverlay,
        &mut tree,
        &mut inputs,
        &to.scratch,
        limits,
        watch,
    )?;
    let mut grown = None;
    if let Some(place) = image.as_parent() {
        share_replaced_files(&mut tree, &inputs)?;
        // If the child can't be appended (the root's attributes are too large, or the image grows
        // over its limit), it may still fit when it is written from scratch.
        if let Ok(plan) = Plan::new(&tree, Some(place), limits.image_bytes) {
            let garbage = u64::from(plan.garbage(place)) * BLOCK;
            if garbage * 2 <= plan.size() {
                grown = Some((plan, garbage, u64::from(place.blocks) * BLOCK));
            }
        }
    }
    let rebuilt = grown.is_none();
    let (plan, garbage, shared) = match grown {
        Some(grown) => {
            copy(to.image)?;
            grown
        }
        None => (Plan::new(&tree, None, limits.image_bytes)?, 0, 0),
    };
    let digest = write(&plan, &inputs, to.image, to.hashed, watch)?;
    let size = plan.size();
    Ok(Child {
        image: Imported {
            digest: digest.unwrap_or_default(),
            size,
            entries: counts.entries,
            dropped_xattrs: counts.dropped,
            config: ImageConfig::default(),
        },
        rebuilt,
        shared,
        garbage,
    })
}

fn digest_of(path: &Path) -> io::Result<String> {
    let mut hasher = blake3::Hasher::new();
    io::copy(&mut File::open(path)?, &mut hasher)?;
    Ok(hasher.finalize().to_hex().to_string())
}

/// Writes an image of Jiffy from scratch, without the garbage of its ancestors. The result is the
/// same as an import of the same tree.
///
/// # Errors
///
/// If it is not an image of Jiffy, exceeds `limits` or can't be read, `out` can't be written, or
/// `watch` cancels it. Nothing is left behind.
pub fn rebuild(
    image: &Path,
    out: &Path,
    limits: &Limits,
    watch: Watch<'_>,
) -> Result<Imported, ImportError> {
    let readable = open_image(image)?;
    let tree = read_tree(&readable, image, limits)?;
    let target = Target::new(out)?;
    let inputs = Inputs {
        parent: Some(readable.image()),
        ..Inputs::default()
    };
    let plan = Plan::new(&tree, None, limits.image_bytes)?;
    let digest = write(&plan, &inputs, target.file(), true, watch)?.unwrap_or_default();
    let (size, entries) = (plan.size(), plan.nodes());
    target.publish()?;
    Ok(Imported {
        digest,
        size,
        entries,
        dropped_xattrs: 0,
        config: ImageConfig::default(),
    })
}

fn read_tree(image: &Readable, path: &Path, limits: &Limits) -> Result<Tree, ImportError> {
    image
        .tree(limits.entries, limits.metadata_bytes)
        .map_err(|source| ImportError::Image {
            path: path.to_owned(),
            source,
        })
}

/// Copies the parent: by reference (FICLONE) where the file system can, else its bytes without
/// zeros.
fn copy(from: &File, to: &File) -> io::Result<()> {
    if rustix::fs::ioctl_ficlone(to, from).is_ok() {
        return Ok(());
    }
    let size = size_of(from)?;
    to.set_len(size)?;
    let mut buffer = vec![0; 1 << 20];
    let mut at = 0;
    while at < size {
        let most = (size - at).min(buffer.len() as u64) as usize;
        let bytes = &mut buffer[..most];
        FileExt::read_exact_at(from, bytes, at)?;
        for (index, piece) in (0u64..).zip(bytes.chunks(16 * BLOCK as usize)) {
            if piece.iter().any(|byte| *byte != 0) {
                to.write_all_at(piece, at + index * 16 * BLOCK)?;
            }
        }
        at += most as u64;
    }
    Ok(())
}

/// Lets replaced files share equal blocks with the parent's: an overlay copies up a whole file to
/// change its mode.
fn share_replaced_files(tree: &mut Tree, inputs: &Inputs) -> Result<(), ImportError> {
    for index in 0..tree.nodes().len() {
        let id = NodeId(index);
        let node = tree.node(id);
        let Some(old) = node.replaced else {
            continue;
        };
        let (Kind::File(new), Kind::File(old)) = (&node.kind, &tree.node(old).kind) else {
            continue;
        };
        if let Some(content) = with_shared_blocks(new, old, inputs)? {
            tree.node_mut(id).kind = Kind::File(content);
        }
    }
    Ok(())
}

/// The new file with the equal blocks taken from the old one. `None` if less than half of its bytes
/// are equal.
fn with_shared_blocks(
    new: &Content,
    old: &Content,
    inputs: &Inputs,
) -> Result<Option<Content>, ImportError> {
    // Bytes after the old file's end count as different.
    if new.size == 0 || new.size / 2 > old.size {
        return Ok(None);
    }
    let mut pieces: Vec<Piece> = Vec::new();
    let mut alike = 0;
    let (mut left, mut right) = (Vec::new(), Vec::new());
    let mut at = 0;
    while at < new.size {
        // A range that is a hole in both files is not read, so that a huge sparse file costs
        // nothing.
        let data = new.next_data(at).min(old.next_data(at));
        let hole = match data < new.size {
            true => data / STRIDE * STRIDE,
            false => new.size,
        };
        if hole > at {
            let known = match hole <= old.size {
                true => hole,
                false => old.size / BLOCK * BLOCK,
            };
            alike += known.saturating_sub(at);
            at = hole;
            continue;
        }
        let len = STRIDE.min(new.size - at);
        inputs.read(new, at, len, &mut left)?;
        let known = old.size.saturating_sub(at).min(len);
        inputs.read(old, at, known, &mut right)?;
        for start in (0..len).step_by(BLOCK as usize) {
            let end = (start + BLOCK).min(len);
            let range = start as usize..end as usize;
            let same = end <= known && left[range.clone()] == right[range];
            let from = if same { old } else { new };
            alike += if same { end - start } else { 0 };
            from.slice(at + start..at + end, &mut pieces);
        }
        at += len;
    }
    if alike < new.size.div_ceil(2) {
        return Ok(None);
    }
    Ok(Some(Content {
        size: new.size,
        pieces: pieces.into(),
        path: new.path.clone(),
    }))
}

impl Content {
    /// Offset of the first data byte at or after `at`; `u64::MAX` if there is none.
    fn next_data(&self, at: u64) -> u64 {
        let next = self
            .pieces
            .partition_point(|piece| piece.at + piece.len <= at);
        self.pieces
            .get(next)
            .map_or(u64::MAX, |piece| piece.at.max(at))
    }

    /// Appends the pieces that cover a range to `to`.
    fn slice(&self, range: std::ops::Range<u64>, to: &mut Vec<Piece>) {
        let first = self
            .pieces
            .partition_point(|piece| piece.at + piece.len <= range.start);
        for piece in &self.pieces[first..] {
            if piece.at >= range.end {
                break;
            }
            let at = piece.at.max(range.start);
            let end = (piece.at + piece.len).min(range.end);
            let from = piece.from + (at - piece.at);
            match to.last_mut() {
                Some(last)
                    if last.input == piece.input
                        && last.at + last.len == at
                        && last.from + last.len == from =>
                {
                    last.len += end - at;
                }
                _ => to.push(Piece {
                    at,
                    len: end - at,
                    from,
                    input: piece.input,
                }),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::Input;
    use proptest::prelude::*;
    use std::io::Write;

    const HUGE: u64 = 1 << 60;

    /// A content with runs of one input file. Each run: offset in the input, offset in the content,
    /// length.
    fn content(size: u64, runs: &[(u64, u64, u64)]) -> Content {
        let piece = |&(from, at, len): &(u64, u64, u64)| Piece {
            at,
            len,
            from,
            input: Input::File(0),
        };
        Content {
            size,
            pieces: runs.iter().map(piece).collect(),
            path: None,
        }
    }

    fn inputs(bytes: &[u8]) -> Inputs {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        Inputs {
            files: vec![Arc::new(file)],
            ..Inputs::default()
        }
    }

    #[test]
    fn holes_are_compared_without_being_read() {
        let inputs = inputs(&[7; 2 * BLOCK as usize]);
        let data = |at| [(0, at, BLOCK)];
        let hole = content(HUGE, &[]);
        let sharing = |new: &Content, old: &Content| with_shared_blocks(new, old, &inputs).unwrap();
        assert_eq!(sharing(&hole, &content(100, &[])), None);
        assert_eq!(sharing(&hole, &content(HUGE / 2 - 1, &[])), None);
        assert_eq!(sharing(&content(u64::MAX, &[]), &content(100, &[])), None);
        assert_eq!(sharing(&hole, &hole), Some(hole.clone()));
        // Both have data at the end; in `other` the data is one block earlier.
        let (one, other) = (
            content(HUGE, &data(HUGE - BLOCK)),
            content(HUGE, &data(HUGE - 2 * BLOCK)),
        );
        assert_eq!(sharing(&one, &one), Some(one.clone()));
        assert_eq!(sharing(&one, &other), Some(one.clone()));
        assert_eq!(sharing(&one, &hole), Some(one));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// The result agrees with a comparison of the files' bytes, block by block.
        #[test]
        fn shared_blocks_are_those_with_equal_bytes(
            sizes in (1..4 * STRIDE, 1..4 * STRIDE),
            runs in (prop::option::of(0..4 * STRIDE), prop::option::of(0..4 * STRIDE)),
        ) {
            let inputs = inputs(&[7; 100]);
            let make = |size: u64, run: Option<u64>| match run {
                Some(at) if at < size => content(size, &[(0, at, (size - at).min(100))]),
                _ => content(size, &[]),
            };
            let (new, old) = (make(sizes.0, runs.0), make(sizes.1, runs.1));
            let bytes = |content: &Content| {
                let mut bytes = Vec::new();
                inputs.read(content, 0, content.size, &mut bytes).unwrap();
                bytes
            };
            let (left, right) = (bytes(&new), bytes(&old));
            let blocks = left.chunks(BLOCK as usize).zip((0..).step_by(BLOCK as usize));
            let alike: usize = blocks
                .filter(|(block, at)| right.get(*at..at + block.len()) == Some(*block))
                .map(|(block, _)| block.len())
                .sum();
            let found = with_shared_blocks(&new, &old, &inputs).unwrap();
            prop_assert_eq!(found.is_some(), alike * 2 >= left.len());
            if let Some(found) = found {
                prop_assert_eq!(bytes(&found), left);
            }
        }
    }
}
