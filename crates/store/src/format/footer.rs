//! The last 256 bytes: the offsets of all sections.

use super::{
    BackingRef, ContentHash, Fields, Header, ImageId, MAX_DICTIONARY, MAX_NAME, Record, VERSION,
    VERSION_WITH_BACKING, VERSIONS, header, is_name, is_sealed, manifest,
};
use crate::error::Fault;
use std::ops::Range;

/// Bytes of a footer.
pub const BYTES: usize = 256;
/// The first bytes of every footer.
pub const MAGIC: [u8; 8] = *b"JIFFYEND";

/// A part of the manifest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Section {
    /// First byte in the file.
    pub offset: u64,
    /// Bytes; 0 if the section is missing.
    pub length: u64,
    /// CRC-32C of its bytes; 0 for groups, entries and hashes, which are checked piece by piece.
    pub checksum: u32,
}

impl Section {
    /// Its bytes in the file.
    pub fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.length
    }
}

/// The last 256 bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Footer {
    /// Bytes of a chunk, as in the header.
    pub chunk_size: u32,
    /// Bytes of the contents, as in the header.
    pub size: u64,
    /// The id of the contents.
    pub id: ImageId,
    /// The bytes of the working set's chunks, contiguous; empty without a working set.
    pub hot: Range<u64>,
    /// The zstd dictionary.
    pub dictionary: Section,
    /// A [`ParentRef`].
    pub parent: Section,
    /// Ranges of chunks in the order of need: first and count, 32 bits each.
    pub working_set: Section,
    /// A [`manifest::Group`] for every 64 chunks.
    pub groups: Section,
    /// A [`manifest::Entry`] for every chunk that is not zero.
    pub entries: Section,
    /// A content hash for every entry.
    pub hashes: Section,
    /// A [`BackingRef`]; with one the image is of version 2.
    pub backing: Section,
}

impl Footer {
    /// The encoded footer.
    pub fn encode(&self) -> [u8; BYTES] {
        let version = match self.backing.length {
            0 => VERSION,
            _ => VERSION_WITH_BACKING,
        };
        let mut record = Record::new()
            .put(&MAGIC)
            .u32(version)
            .u32(self.chunk_size)
            .u64(self.size)
            .put(&self.id.0)
            .u64(self.hot.start)
            .u64(self.hot.end);
        // Version 1 has zeros in place of the last section.
        let count = if version == VERSION { 6 } else { 7 };
        for section in &self.sections()[..count] {
            record = record
                .u64(section.offset)
                .u64(section.length)
                .u32(section.checksum)
                .u32(0);
        }
        record.seal()
    }

    /// Decodes the footer of a file of `length` bytes with that header, and checks that every
    /// offset is within the file.
    ///
    /// # Errors
    ///
    /// If the magic, version or checksum is wrong, a field contradicts the format or the header, or
    /// a section has a wrong length or place.
    pub fn decode(bytes: &[u8; BYTES], length: u64, header: &Header) -> Result<Footer, Fault> {
        let offset = length.saturating_sub(BYTES as u64);
        let damaged = |what| Err(Fault::Damaged { offset, what });
        let mut fields = Fields(bytes);
        if fields.array() != MAGIC {
            return Err(Fault::Truncated { length, offset });
        }
        let found = fields.u32();
        if !(VERSION..=VERSION_WITH_BACKING).contains(&found) {
            let offset = offset + 8;
            return Err(Fault::Version {
                found,
                known: VERSIONS,
                offset,
            });
        }
        if !is_sealed(bytes) {
            return damaged("the footer's checksum is wrong");
        }
        let chunk_size = fields.u32();
        let size = fields.u64();
        let id = ImageId(fields.array());
        let hot = fields.u64()..fields.u64();
        let mut section = || {
            let section = Section {
                offset: fields.u64(),
                length: fields.u64(),
                checksum: fields.u32(),
            };
            (section, fields.u32())
        };
        let read = [(); 6].map(|()| section());
        let (backing, of_backing) = match found {
            VERSION => (Section::default(), 0),
            _ => section(),
        };
        let reserved = read.iter().any(|(_, reserved)| *reserved != 0)
            || of_backing != 0
            || fields.0[..fields.0.len() - 4].iter().any(|byte| *byte != 0);
        let [dictionary, parent, working_set, groups, entries, hashes] =
            read.map(|(section, _)| section);
        let footer = Footer {
            chunk_size,
            size,
            id,
            hot,
            dictionary,
            parent,
            working_set,
            groups,
            entries,
            hashes,
            // A missing section has no offset.
            backing: match found {
                VERSION => Section {
                    offset: hashes.offset.saturating_add(hashes.length),
                    ..backing
                },
                _ => backing,
            },
        };
        if reserved {
            return damaged("reserved bytes of the footer are not zero");
        }
        if (footer.chunk_size, footer.size) != (header.chunk_size, header.size) {
            return damaged("header and footer disagree about the size");
        }
        if (found == VERSION_WITH_BACKING) != (footer.backing.length > 0) {
            return damaged("version 2 without a backing file");
        }
        match footer.misplaced_section(offset) {
            Some(what) => damaged(what),
            None => Ok(footer),
        }
    }

    /// Where the chunks end and the manifest begins.
    pub fn data_end(&self) -> u64 {
        self.dictionary.offset
    }

    /// The sections in the order of the file.
    fn sections(&self) -> [Section; 7] {
        [
            self.dictionary,
            self.parent,
            self.working_set,
            self.groups,
            self.entries,
            self.hashes,
            self.backing,
        ]
    }

    fn misplaced_section(&self, end: u64) -> Option<&'static str> {
        let mut next = self.dictionary.offset;
        if next < header::BYTES as u64 {
            return Some("the manifest begins inside the header");
        }
        for section in self.sections() {
            if section.offset != next {
                return Some("the sections do not follow one another");
            }
            next = match next.checked_add(section.length) {
                Some(next) if next <= end => next,
                _ => return Some("a section lies outside the file"),
            };
        }
        if next != end {
            return Some("the sections do not reach the footer");
        }
        let chunks = u64::from(super::chunks(self.size, self.chunk_size).unwrap_or(0));
        let groups = chunks.div_ceil(u64::from(super::GROUP));
        let entries = self.entries.length / manifest::ENTRY_BYTES as u64;
        let lengths_fit = self.groups.length == groups * manifest::GROUP_BYTES as u64
            && self.entries.length == entries * manifest::ENTRY_BYTES as u64
            && self.hashes.length == entries * size_of::<ContentHash>() as u64
            && entries <= chunks
            && self.working_set.length.is_multiple_of(8)
            && self.working_set.length / 8 <= chunks
            && self.dictionary.length <= MAX_DICTIONARY
            && (self.parent.length == 0
                || (17..=16 + MAX_NAME as u64).contains(&self.parent.length))
            && (self.backing.length == 0 || BackingRef::LENGTHS.contains(&self.backing.length));
        if !lengths_fit {
            return Some("a section has the wrong length");
        }
        let hot = &self.hot;
        if hot.is_empty() {
            return (*hot != (0..0)).then_some("the working set's place is wrong");
        }
        if hot.start < header::BYTES as u64 || hot.end > self.data_end() {
            return Some("the working set's place is wrong");
        }
        None
    }
}

/// A child's reference to its parent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParentRef {
    /// The id of the parent's contents.
    pub id: ImageId,
    /// Its name: 1 to 255 bytes, no `/`, not `.` or `..`. The reader resolves it; by default it is
    /// a file in the child's folder.
    pub name: String,
}

impl ParentRef {
    /// The encoded reference.
    pub fn encode(&self) -> Vec<u8> {
        [&self.id.0[..], self.name.as_bytes()].concat()
    }

    /// Decodes a reference; `None` if the name is not valid.
    pub fn decode(bytes: &[u8]) -> Option<ParentRef> {
        let (id, name) = bytes.split_first_chunk()?;
        let name = str::from_utf8(name).ok()?;
        is_name(name).then(|| ParentRef {
            id: ImageId(*id),
            name: name.to_owned(),
        })
    }
}
