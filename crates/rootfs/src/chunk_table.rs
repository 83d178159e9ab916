//! Chunk tables, by which EROFS stores a file with large holes: the chunk size, and when a file
//! gets one.

use std::ops::Range;

/// Block size of an EROFS image, bytes.
pub const BLOCK_SIZE: u64 = 4096;
/// Most chunks of one file; its table has 4 bytes for each.
pub const MAX_CHUNKS: u64 = 1 << 18;
/// Largest chunk: log2 of its blocks.
pub const MAX_CHUNK_BITS: u32 = 31;
/// A file gets a chunk table if its holes have at least this many bytes.
const MIN_HOLE_BYTES: u64 = 1 << 20;

/// The smallest chunk size that needs at most [`MAX_CHUNKS`] chunks: log2 of its blocks. `None` if
/// the file is larger than EROFS can describe.
pub fn chunk_bits(size: u64) -> Option<u32> {
    (0..=MAX_CHUNK_BITS).find(|bits| size.div_ceil(BLOCK_SIZE << bits) <= MAX_CHUNKS)
}

/// Whether a file of this size, with data in these ranges, gets a chunk table. `None` if it is
/// larger than EROFS can describe.
pub fn needs_table(size: u64, data: impl Iterator<Item = Range<u64>>) -> Option<bool> {
    Some(hole_bytes(size, chunk_bits(size)?, data) >= MIN_HOLE_BYTES)
}

/// Bytes of the file's chunk table, in memory and in the image; 0 if it gets none.
pub fn table_bytes(size: u64, data: impl Iterator<Item = Range<u64>>) -> u64 {
    match (chunk_bits(size), needs_table(size, data)) {
        (Some(bits), Some(true)) => 4 * size.div_ceil(BLOCK_SIZE << bits),
        _ => 0,
    }
}

/// Bytes in chunks that hold no data at all. Only these count, so that an image that is read back
/// and written again has the same bytes.
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
