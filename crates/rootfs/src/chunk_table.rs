//! Tables of chunks, in which EROFS stores a file with large holes: their size and when
//! they are worth it.

use std::ops::Range;

/// Bytes of a block of an EROFS image.
pub const BLOCK_SIZE: u64 = 4096;
/// The most chunks of one file: its table has 4 bytes for each.
pub const MAX_CHUNKS: u64 = 1 << 18;
/// The largest chunk, as a power of two of blocks.
pub const MAX_CHUNK_BITS: u32 = 31;
/// A file is worth a table of chunks if its holes have so many bytes.
const HOLES_WORTH_A_TABLE: u64 = 1 << 20;

/// Chunks as small as the table may be long, as a power of two of blocks; `None` if the file
/// is larger than EROFS can describe.
pub fn chunk_bits(size: u64) -> Option<u32> {
    (0..=MAX_CHUNK_BITS).find(|bits| size.div_ceil(BLOCK_SIZE << bits) <= MAX_CHUNKS)
}

/// Whether a file of this size, with bytes in these ranges, is worth a table; `None` if it
/// is larger than EROFS can describe.
pub fn is_worth_it(size: u64, data: impl Iterator<Item = Range<u64>>) -> Option<bool> {
    Some(hole_bytes(size, chunk_bits(size)?, data) >= HOLES_WORTH_A_TABLE)
}

/// Bytes of the table that a file needs, in memory and in the image; 0 if it needs none.
pub fn table_bytes(size: u64, data: impl Iterator<Item = Range<u64>>) -> u64 {
    match (chunk_bits(size), is_worth_it(size, data)) {
        (Some(bits), Some(true)) => 4 * size.div_ceil(BLOCK_SIZE << bits),
        _ => 0,
    }
}

/// Bytes of the chunks in which nothing is: so the image can be read back and
/// written again the same.
fn hole_bytes(size: u64, bits: u32, data: impl Iterator<Item = Range<u64>>) -> u64 {
    let chunk = BLOCK_SIZE << bits;
    let end = size.next_multiple_of(chunk);
    let mut at = 0u64;
    let mut holes = 0;
    for range in data.chain(std::iter::once(end..end)) {
        let (first, last) = (at.next_multiple_of(chunk), range.start / chunk * chunk);
        holes += last.saturating_sub(first);
        at = range.end;
    }
    holes
}
