//! The hashes of a file's blocks, by which parts of its packs are held against what was
//! pushed before anybody looks at them.
//!
//! The SHA-256 of a pack is over all of it. So a file that is read in parts has another one
//! beside it in the artifact, `NAME.blocks`, a pack of its own: the first half of BLAKE3 of
//! each 64 KiB of the file. Whoever has the manifest's digest has the pack's, and by that
//! every block's hash.

use super::is_name;
use crate::Descriptor;
use crate::error::Result;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// The role of a pack of hashes.
pub(super) const ROLE: &str = "blocks";
/// What is behind the file's name in that of its hashes.
const SUFFIX: &str = ".blocks";
/// Bytes of a block; the last of a file may have fewer.
pub(super) const BLOCK: u64 = 64 << 10;
/// Bytes of a hash.
const HASH: usize = 16;

/// The hashes of one file's blocks: fetched when they are needed, by all clones once.
#[derive(Clone, Debug)]
pub(super) struct Blocks {
    blob: Descriptor,
    hashes: Arc<OnceLock<Vec<u8>>>,
}

/// What the file of hashes is called; `None` if that is no name.
pub(super) fn name_of(file: &str) -> Option<String> {
    let name = format!("{file}{SUFFIX}");
    is_name(&name).then_some(name)
}

/// The hashes of blocks that follow one another; the last may be shorter.
pub(super) fn hashes(bytes: &[u8]) -> Vec<u8> {
    let blocks = bytes.chunks(BLOCK as usize);
    blocks.flat_map(hash).collect()
}

fn hash(block: &[u8]) -> [u8; HASH] {
    let mut half = [0; HASH];
    half.copy_from_slice(&blake3::hash(block).as_bytes()[..HASH]);
    half
}

/// The name of the file whose hashes a file of this name has.
pub(super) fn file_of(name: &str) -> Option<&str> {
    name.strip_suffix(SUFFIX)
}

impl Blocks {
    /// Those in this pack, of a file of so many bytes; `None` if it has another number.
    pub fn of(blob: &Descriptor, size: u64) -> Option<Blocks> {
        (blob.size == size.div_ceil(BLOCK) * HASH as u64).then(|| Blocks {
            blob: blob.clone(),
            hashes: Arc::default(),
        })
    }

    /// The pack that they are.
    pub fn blob(&self) -> &Descriptor {
        &self.blob
    }

    /// The whole blocks that hold these bytes of a file of so many.
    pub fn around(range: &Range<u64>, size: u64) -> Range<u64> {
        range.start / BLOCK * BLOCK..range.end.next_multiple_of(BLOCK).min(size)
    }

    /// The first of some whole blocks, from this byte of the file on, that has another hash
    /// than it must have. `fetch` gets the hashes if they are not known yet.
    pub fn first_wrong(
        &self,
        start: u64,
        bytes: &[u8],
        fetch: impl FnOnce(&Descriptor) -> Result<Vec<u8>>,
    ) -> Result<Option<u64>> {
        let known = match self.hashes.get() {
            Some(known) => known,
            None => {
                let fetched = fetch(&self.blob)?;
                self.hashes.get_or_init(|| fetched)
            }
        };
        let known = known.chunks_exact(HASH).skip((start / BLOCK) as usize);
        let blocks = bytes.chunks(BLOCK as usize).zip(known);
        let wrong = (start / BLOCK..).zip(blocks);
        let mut wrong = wrong.filter(|(_, (block, known))| hash(block) != **known);
        Ok(wrong.next().map(|(number, _)| number))
    }
}
