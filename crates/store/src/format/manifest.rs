//! Groups of 64 chunks, and an entry for each chunk that is not zero.

use super::{BACKING_BLOCK, Fields, GROUP, Record};
use std::ops::Range;

/// Bytes of a group.
pub const GROUP_BYTES: usize = 16;
/// Bytes of an entry.
pub const ENTRY_BYTES: usize = 16;
const MAX_OFFSET: u64 = 1 << 48;

/// Where a chunk's bytes are, and how they are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// Nowhere: all bytes are zero.
    Zero,
    /// In the file, not compressed.
    Raw,
    /// In the file, an LZ4 block.
    Lz4,
    /// In the file, a zstd frame.
    Zstd,
    /// In the file, a zstd frame made with the image's dictionary.
    ZstdDictionary,
    /// In the same chunk of the parent.
    Parent,
    /// In the backing file.
    Backing,
}

impl Kind {
    /// Every kind there is.
    pub const ALL: [Kind; 7] = [
        Kind::Zero,
        Kind::Raw,
        Kind::Lz4,
        Kind::Zstd,
        Kind::ZstdDictionary,
        Kind::Parent,
        Kind::Backing,
    ];

    /// The name for messages.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Zero => "zero",
            Kind::Raw => "raw",
            Kind::Lz4 => "lz4",
            Kind::Zstd => "zstd",
            Kind::ZstdDictionary => "zstd with dictionary",
            Kind::Parent => "in parent",
            Kind::Backing => "in backing file",
        }
    }

    /// Whether such a chunk has bytes in the image's own file.
    pub fn is_stored(self) -> bool {
        !matches!(self, Kind::Zero | Kind::Parent | Kind::Backing)
    }

    fn code(self) -> u8 {
        match self {
            Kind::Zero => 0,
            Kind::Raw => 1,
            Kind::Lz4 => 2,
            Kind::Zstd => 3,
            Kind::ZstdDictionary => 4,
            Kind::Parent => 5,
            Kind::Backing => 6,
        }
    }

    fn from_code(code: u8) -> Option<Kind> {
        Kind::ALL.get(usize::from(code)).copied()
    }
}

/// A chunk that is not zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// CRC-32C of the whole chunk, uncompressed.
    pub checksum: u32,
    /// Its bytes in the file; 0 if it is in the parent or in the backing file.
    pub length: u32,
    /// Where its bytes begin, in this file or in the backing file; 0 if it is in the parent.
    pub offset: u64,
    /// Where its bytes are, and how.
    pub kind: Kind,
}

impl Entry {
    /// Its bytes in the file.
    pub fn range(&self) -> Range<u64> {
        self.offset..self.offset + u64::from(self.length)
    }

    /// The encoded entry. The offset has 48 bits.
    pub fn encode(&self) -> [u8; ENTRY_BYTES] {
        debug_assert!(self.offset < MAX_OFFSET);
        let mut bytes = [0; ENTRY_BYTES];
        bytes[..4].copy_from_slice(&self.checksum.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.length.to_le_bytes());
        bytes[8..].copy_from_slice(&self.offset.to_le_bytes());
        bytes[14] = self.kind.code();
        bytes
    }

    fn decode(bytes: &[u8; ENTRY_BYTES]) -> Option<Entry> {
        let mut fields = Fields(bytes);
        let checksum = fields.u32();
        let length = fields.u32();
        let last = fields.u64();
        let kind = Kind::from_code((last >> 48) as u8)?;
        (last >> 56 == 0 && kind != Kind::Zero).then_some(Entry {
            checksum,
            length,
            offset: last & (MAX_OFFSET - 1),
            kind,
        })
    }
}

/// What the entries of an image must satisfy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a chunk.
    pub chunk_size: u32,
    /// The start and the end of the file's part that holds chunks, bytes.
    pub data: (u64, u64),
    /// The image has a parent.
    pub parent: bool,
    /// The image has a dictionary.
    pub dictionary: bool,
    /// Bytes of the backing file, if there is one.
    pub backing: Option<u64>,
}

impl Limits {
    fn violation(&self, entry: &Entry) -> Option<&'static str> {
        match entry.kind {
            Kind::Zero => return Some("an entry for a zero chunk"),
            Kind::Parent => return self.parent_violation(entry),
            Kind::Backing => return self.backing_violation(entry),
            Kind::Raw if entry.length != self.chunk_size => {
                return Some("a raw chunk has a wrong length");
            }
            Kind::Raw | Kind::Lz4 | Kind::Zstd => {}
            Kind::ZstdDictionary if !self.dictionary => {
                return Some("a chunk needs a dictionary, and there is none");
            }
            Kind::ZstdDictionary => {}
        }
        if entry.length == 0 || entry.length > self.chunk_size {
            return Some("the stored length of a chunk is 0 or more than a chunk's");
        }
        let range = entry.range();
        (range.start < self.data.0 || range.end > self.data.1)
            .then_some("a chunk lies outside the file's chunks")
    }

    fn parent_violation(&self, entry: &Entry) -> Option<&'static str> {
        if !self.parent {
            Some("a chunk is in the parent, and there is none")
        } else if entry.length != 0 || entry.offset != 0 {
            Some("a chunk in the parent has an offset or a length in this file")
        } else {
            None
        }
    }

    fn backing_violation(&self, entry: &Entry) -> Option<&'static str> {
        let Some(size) = self.backing else {
            return Some("a chunk is in a backing file, and there is none");
        };
        if entry.length != 0 {
            Some("a chunk in the backing file has bytes in this one")
        } else if !entry.offset.is_multiple_of(BACKING_BLOCK) {
            Some("a chunk in the backing file does not begin at a block")
        } else if entry.offset + u64::from(self.chunk_size) > size {
            Some("a chunk lies outside the backing file")
        } else {
            None
        }
    }
}

/// The first 16 bytes of a group of 64 chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group {
    /// Bit N: chunk N of the group is not zero and has an entry.
    pub bitmap: u64,
    /// The number of the group's first entry; the others follow it.
    pub first: u32,
    /// As computed by [`Group::checksum`].
    pub checksum: u32,
}

impl Group {
    /// The encoded group.
    pub fn encode(&self) -> [u8; GROUP_BYTES] {
        let mut bytes = [0; GROUP_BYTES];
        bytes[..8].copy_from_slice(&self.bitmap.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.first.to_le_bytes());
        bytes[12..].copy_from_slice(&self.checksum.to_le_bytes());
        bytes
    }

    /// Decodes a group without its entries.
    pub fn decode(bytes: &[u8; GROUP_BYTES]) -> Group {
        let mut fields = Fields(bytes);
        Group {
            bitmap: fields.u64(),
            first: fields.u32(),
            checksum: fields.u32(),
        }
    }

    /// The numbers of its entries; `None` if there are not so many entries, or if its bitmap has
    /// chunks beyond the last.
    pub fn entries(&self, number: u32, chunks: u32, entries: u32) -> Option<Range<u32>> {
        let members = chunks.saturating_sub(number * GROUP).min(GROUP);
        let beyond = self.bitmap.checked_shr(members).unwrap_or(0);
        let end = self.first.checked_add(self.bitmap.count_ones())?;
        (beyond == 0 && end <= entries).then_some(self.first..end)
    }

    /// CRC-32C of the group's number, its bitmap, its first entry's number
    /// (four, eight, four bytes), and its entries.
    pub fn checksum(&self, number: u32, entries: &[u8]) -> u32 {
        let head: [u8; 16] = Record::new()
            .u32(number)
            .u64(self.bitmap)
            .u32(self.first)
            .bytes();
        let mut sum = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
        sum.update(&head);
        sum.update(entries);
        sum.finalize() as u32
    }

    /// Decodes all of its entries.
    ///
    /// # Errors
    ///
    /// If the group's checksum is wrong, or an entry has an unknown kind or violates `limits`.
    pub fn decode_entries(
        &self,
        number: u32,
        bytes: &[u8],
        limits: &Limits,
    ) -> Result<Vec<Entry>, &'static str> {
        if self.checksum(number, bytes) != self.checksum {
            return Err("the checksum of a group of chunks is wrong");
        }
        let (entries, _) = bytes.as_chunks();
        entries
            .iter()
            .map(|bytes| {
                let entry = Entry::decode(bytes).ok_or("the kind of a chunk is unknown")?;
                limits.violation(&entry).map_or(Ok(entry), Err)
            })
            .collect()
    }
}
