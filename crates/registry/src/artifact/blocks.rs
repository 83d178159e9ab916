//! Block hashes of a file, which verify parts of its packs before they are used.
//!
//! A pack's SHA-256 covers the whole pack. A file that is read in parts therefore has a second file
//! in the artifact, `NAME.blocks`, in a pack of its own: the first half of the BLAKE3 of each 64
//! KiB of the file. The manifest's digest covers the digest of that pack, and so every block hash.

use super::is_name;
use crate::Descriptor;
use crate::error::Result;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// Role of a pack of block hashes.
pub(super) const ROLE: &str = "blocks";
/// Suffix of the name of a file of block hashes.
const SUFFIX: &str = ".blocks";
/// Bytes of a block; the last block of a file may be shorter.
pub(super) const BLOCK: u64 = 64 << 10;
/// Bytes of a hash.
const HASH: usize = 16;

/// The block hashes of one file. They are fetched at first use, once for all clones.
#[derive(Clone, Debug)]
pub(super) struct Blocks {
    blob: Descriptor,
    hashes: Arc<OnceLock<Vec<u8>>>,
}

/// Name of the file of block hashes; `None` if it is not valid.
pub(super) fn name_of(file: &str) -> Option<String> {
    let name = format!("{file}{SUFFIX}");
    is_name(&name).then_some(name)
}

/// Hashes of consecutive blocks; the last block may be shorter.
pub(super) fn hashes(bytes: &[u8]) -> Vec<u8> {
    let blocks = bytes.chunks(BLOCK as usize);
    blocks.flat_map(hash).collect()
}

fn hash(block: &[u8]) -> [u8; HASH] {
    let mut half = [0; HASH];
    half.copy_from_slice(&blake3::hash(block).as_bytes()[..HASH]);
    half
}

/// Name of the file to which a file of block hashes belongs.
pub(super) fn file_of(name: &str) -> Option<&str> {
    name.strip_suffix(SUFFIX)
}

impl Blocks {
    /// The block hashes in this pack, for a file of `size` bytes; `None` if the pack has the wrong
    /// size.
    pub fn of(blob: &Descriptor, size: u64) -> Option<Blocks> {
        (blob.size == size.div_ceil(BLOCK) * HASH as u64).then(|| Blocks {
            blob: blob.clone(),
            hashes: Arc::default(),
        })
    }

    /// The pack that holds the hashes.
    pub fn blob(&self) -> &Descriptor {
        &self.blob
    }

    /// Extends a range of a file of `size` bytes to whole blocks.
    pub fn around(range: &Range<u64>, size: u64) -> Range<u64> {
        range.start / BLOCK * BLOCK..range.end.next_multiple_of(BLOCK).min(size)
    }

    /// Verifies whole blocks that begin at byte `start` of the file. Returns the number of the
    /// first block with a wrong hash. `fetch` gets the hashes if they are not cached.
    ///
    /// # Errors
    ///
    /// If `fetch` fails.
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
