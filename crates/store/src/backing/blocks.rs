//! Finds chunks in a file, at any offset that is a multiple of 4 KiB.

use crate::codec::is_zero;
use crate::format::BACKING_BLOCK;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

const BLOCK_BYTES: usize = BACKING_BLOCK as usize;
/// Bytes that are read at once.
const PIECE: usize = 1 << 20;
/// Most blocks with the checksum of a chunk's first block that are examined: very many blocks may
/// be equal.
const MAX_CANDIDATES: usize = 1024;
/// Most of these whose bytes are read and compared.
const MAX_COMPARED: usize = 8;

/// The checksums of a file's blocks of 4 KiB: eight bytes of memory for each.
pub struct BlockTable {
    /// By block. A last one that is not whole is left out.
    checksums: Vec<u32>,
    /// The blocks that are not zero, by checksum, then by number.
    order: Vec<u32>,
}

impl BlockTable {
    /// Reads all of a file, which must have less than 16 TiB.
    ///
    /// # Errors
    ///
    /// If the file has 16 TiB or more, or can't be read.
    pub fn of(file: &File) -> io::Result<BlockTable> {
        let blocks = file.metadata()?.len() / BACKING_BLOCK;
        if u32::try_from(blocks).is_err() {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let mut checksums = Vec::with_capacity(blocks as usize);
        let mut order = Vec::with_capacity(blocks as usize);
        let mut piece = vec![0; PIECE];
        let mut at = 0;
        while at < blocks * BACKING_BLOCK {
            let count = (blocks * BACKING_BLOCK - at).min(PIECE as u64);
            let piece = &mut piece[..count as usize];
            file.read_exact_at(piece, at)?;
            for block in piece.chunks_exact(BLOCK_BYTES) {
                if !is_zero(block) {
                    order.push(checksums.len() as u32);
                }
                checksums.push(crc_fast::crc32_iscsi(block));
            }
            at += count;
        }
        order.sort_unstable_by_key(|block| (checksums[*block as usize], *block));
        order.shrink_to_fit();
        Ok(BlockTable { checksums, order })
    }

    /// The offset of these bytes in `file`, which the table must be of; a multiple of 4 KiB. Bytes
    /// that can't be read are not found, and neither are chunks that begin with a block of zeros.
    pub(super) fn find(&self, file: &File, chunk: &[u8]) -> Option<u64> {
        let sums: Vec<u32> = chunk
            .chunks(BLOCK_BYTES)
            .map(crc_fast::crc32_iscsi)
            .collect();
        let first = *sums.first()?;
        let of = |block: &u32| self.checksums[*block as usize];
        let start = self.order.partition_point(|block| of(block) < first);
        self.order[start..]
            .iter()
            .take(MAX_CANDIDATES)
            .take_while(|block| of(block) == first)
            .filter(|block| self.checksums[**block as usize..].starts_with(&sums))
            .take(MAX_COMPARED)
            .map(|block| u64::from(*block) * BACKING_BLOCK)
            .find(|offset| {
                let mut there = vec![0; chunk.len()];
                file.read_exact_at(&mut there, *offset).is_ok() && there == chunk
            })
    }
}

impl fmt::Debug for BlockTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockTable")
            .field("blocks", &self.checksums.len())
            .finish_non_exhaustive()
    }
}
