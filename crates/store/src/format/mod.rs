//! The bytes of an image that are not chunks, as `docs/image-format.md` specifies them.
//!
//! Numbers are little-endian. A file consists of a header, chunks, the sections of the manifest,
//! and a footer with the sections' offsets.
//!
//! * [`header`]: the first 64 bytes.
//! * [`footer`]: the last 256.
//! * [`manifest`]: groups of chunks and their entries.
//! * [`backing`]: an image's reference to its backing file.

pub mod backing;
pub mod footer;
pub mod header;
pub mod manifest;
#[cfg(test)]
mod tests;

pub use backing::BackingRef;
pub use footer::{Footer, ParentRef, Section};
pub use header::Header;
pub use manifest::{Entry, Group, Kind};

use std::fmt;

/// The version of an image without a backing file, and of every header.
pub const VERSION: u32 = 1;
/// The version of an image with a backing file, the newest one.
pub const VERSION_WITH_BACKING: u32 = 2;
/// The versions that are read.
const VERSIONS: [u32; 2] = [VERSION, VERSION_WITH_BACKING];
/// The smallest chunk, bytes.
pub const MIN_CHUNK: u32 = 4 << 10;
/// The largest chunk, bytes.
pub const MAX_CHUNK: u32 = 2 << 20;
/// Chunks of a group.
pub const GROUP: u32 = 64;
/// The longest name of a parent or a backing file, bytes.
pub const MAX_NAME: usize = 255;
/// The largest dictionary, bytes.
pub const MAX_DICTIONARY: u64 = 1 << 20;
/// The longest chain of parents that is followed.
pub const MAX_DEPTH: usize = 64;

/// Chunks of a backing file begin at multiples of this, bytes.
pub const BACKING_BLOCK: u64 = 4096;

/// The first half of a content hash (BLAKE3) of a whole chunk.
pub type ContentHash = [u8; 16];

/// Identifies the contents of an image, in 16 bytes: equal contents in chunks of equal size have
/// equal ids, however they are stored.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ImageId(pub [u8; 16]);

impl fmt::Display for ImageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for ImageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The content hash of a chunk, which is padded with zeros to its full size.
pub fn content_hash(chunk: &[u8]) -> ContentHash {
    first_half(blake3::hash(chunk))
}

fn first_half(hash: blake3::Hash) -> [u8; 16] {
    let mut half = [0; 16];
    half.copy_from_slice(&hash.as_bytes()[..16]);
    half
}

/// Computes an [`ImageId`] from the size, then the bitmaps of the groups, then the content hashes
/// of the chunks that are not zero, in order.
#[derive(Debug)]
pub struct IdHasher(blake3::Hasher);

impl IdHasher {
    /// Begins with the size of the contents and the size of a chunk, bytes.
    pub fn new(size: u64, chunk_size: u32) -> IdHasher {
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"jiffy image 1\0\0\0");
        hasher.update(&size.to_le_bytes());
        hasher.update(&u64::from(chunk_size).to_le_bytes());
        IdHasher(hasher)
    }

    /// The next group's bitmap. All bitmaps come before the first hash.
    pub fn bitmap(&mut self, bitmap: u64) {
        self.0.update(&bitmap.to_le_bytes());
    }

    /// The next chunk's hash.
    pub fn chunk(&mut self, hash: &ContentHash) {
        self.0.update(hash);
    }

    /// The id.
    pub fn finish(&self) -> ImageId {
        ImageId(first_half(self.0.finalize()))
    }
}

/// Whether chunks may have this many bytes.
pub fn is_chunk_size(bytes: u32) -> bool {
    bytes.is_power_of_two() && (MIN_CHUNK..=MAX_CHUNK).contains(&bytes)
}

/// How many chunks `size` bytes have; `None` if their numbers would not fit.
pub fn chunks(size: u64, chunk_size: u32) -> Option<u32> {
    u32::try_from(size.div_ceil(u64::from(chunk_size))).ok()
}

/// Whether a parent or a backing file may have this name; no valid name leads out of the folder.
pub fn is_name(name: &str) -> bool {
    (1..=MAX_NAME).contains(&name.len())
        && !name.contains(['/', '\0'])
        && name != "."
        && name != ".."
}

/// Reads numbers one after the other. Reading past the end gives zeros, so callers must pass arrays
/// of the right length.
pub(crate) struct Fields<'a>(pub &'a [u8]);

impl Fields<'_> {
    pub(crate) fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let count = N.min(self.0.len());
        array[..count].copy_from_slice(&self.0[..count]);
        self.0 = &self.0[count..];
        array
    }

    #[inline]
    pub(crate) fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    #[inline]
    pub(crate) fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }
}

/// Writes numbers one after the other into a fixed number of bytes.
pub(crate) struct Record<const N: usize> {
    bytes: [u8; N],
    at: usize,
}

impl<const N: usize> Record<N> {
    pub(crate) fn new() -> Record<N> {
        Record {
            bytes: [0; N],
            at: 0,
        }
    }

    pub(crate) fn put(mut self, field: &[u8]) -> Record<N> {
        self.bytes[self.at..self.at + field.len()].copy_from_slice(field);
        self.at += field.len();
        self
    }

    pub(crate) fn u32(self, number: u32) -> Record<N> {
        self.put(&number.to_le_bytes())
    }

    pub(crate) fn u64(self, number: u64) -> Record<N> {
        self.put(&number.to_le_bytes())
    }

    pub(crate) fn bytes(self) -> [u8; N] {
        self.bytes
    }

    /// The bytes, with the checksum of all but the last four in the last four.
    pub(crate) fn seal(mut self) -> [u8; N] {
        seal(&mut self.bytes);
        self.bytes
    }
}

/// Writes the checksum of all bytes but the last four into the last four.
pub(crate) fn seal(bytes: &mut [u8]) {
    let (body, checksum) = bytes.split_at_mut(bytes.len() - 4);
    checksum.copy_from_slice(&crc_fast::crc32_iscsi(body).to_le_bytes());
}

pub(crate) fn is_sealed(bytes: &[u8]) -> bool {
    let (body, checksum) = bytes.split_at(bytes.len() - 4);
    crc_fast::crc32_iscsi(body).to_le_bytes() == checksum
}
