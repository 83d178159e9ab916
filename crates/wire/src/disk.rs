//! Disks that are filled on demand: the map of what is stored, and how a VMM requests
//! the rest from a pager.
//!
//! A disk cache is a folder with the file `contents`, sparse and as long as
//! the disk, and the map `present` ([`MapHeader`], then a bit for each chunk).
//! A bit is set after the bytes were written. VMMs map `present` read-only and
//! read `contents`; only the pager writes either.
//!
//! For missing chunks a VMM connects to the disk's socket and sends one
//! [`ChunkRequest`] a line as JSON. Each is answered with one [`ChunkAnswer`]
//! a line, in any order. To a VMM that began with [`ChunkRequest::TAKES_BYTES`] an
//! answer may carry bytes. `docs/disk-cache.md` describes the protocol.

use serde::{Deserialize, Serialize};

/// The file with the disk's bytes in a cache's folder.
pub const CONTENTS: &str = "contents";
/// The map beside it.
pub const PRESENT: &str = "present";

/// Bytes of a map's header; the bits follow.
pub const MAP_HEADER: usize = 128;
/// The first bytes of every map.
pub const MAP_MAGIC: [u8; 8] = *b"\x89JIFMAP\n";
/// The version written and the only one read.
pub const MAP_VERSION: u32 = 1;
/// The most units a map may have: their numbers fit in 32 bits.
pub const MAP_UNITS_MAX: u64 = u32::MAX as u64;

/// The longest line of a VMM, and of a pager's answer, bytes.
pub const LINE_MAX: usize = 4096;
/// The most bytes one request may ask for.
pub const REQUEST_BYTES_MAX: u64 = 64 << 20;
/// The most bytes one answer brings.
pub const ANSWER_BYTES_MAX: usize = 256 << 10;

/// The first 128 bytes of a map. The same format tells which chunks of a disk
/// cache are there, and which blocks of an image that is still arriving.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MapHeader {
    /// Bytes a bit stands for: a power of two from 4 KiB to 2 MiB.
    pub unit: u32,
    /// Bytes of the file that is mapped. The last unit may be cut off.
    pub length: u64,
    /// Bytes from here on are there in any case; equals `length` if there is
    /// no such part.
    pub tail: u64,
    /// What the image holds that the bytes come from.
    pub image: [u8; 16],
    /// The boot of the host in which bits were set last. Bits of another boot
    /// mean nothing: they may have reached the disk before what they stand
    /// for. Zeros if all was synced since, and so for ever valid.
    pub boot: [u8; 16],
}

/// Why bytes are not a map.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MapError {
    /// Something else.
    #[error("it is not a map: there is no magic at byte 0")]
    NotAMap,
    /// Of a format this program does not know.
    #[error("the map has format version {0} (at byte 8); this program reads version {MAP_VERSION}")]
    Version(u32),
    /// Its checksum is wrong.
    #[error("the map is damaged: the checksum at byte 124 is wrong")]
    Checksum,
    /// A field contradicts the format.
    #[error("the map is damaged: {0}")]
    Field(&'static str),
    /// The file is not as long as its bits are many.
    #[error("the map has {found} bytes instead of {expected}")]
    Length {
        /// What the header asks for.
        expected: u64,
        /// Bytes of the file.
        found: u64,
    },
}

fn number(bytes: &[u8; MAP_HEADER], at: usize) -> u64 {
    let mut field = [0; 8];
    field.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(field)
}

impl MapHeader {
    /// How many units there are.
    pub fn units(&self) -> u64 {
        self.length.div_ceil(u64::from(self.unit))
    }

    /// Refuses more units than [`MAP_UNITS_MAX`].
    pub fn check_units(&self) -> Result<(), MapError> {
        match self.units() > MAP_UNITS_MAX {
            true => Err(MapError::Field("it has more than 2^32 - 1 units")),
            false => Ok(()),
        }
    }

    /// Bytes of the whole file: header and bits, in whole words of 64.
    pub fn file_bytes(&self) -> u64 {
        MAP_HEADER as u64 + self.units().div_ceil(64) * 8
    }

    /// As written.
    pub fn encode(&self) -> [u8; MAP_HEADER] {
        let mut bytes = [0; MAP_HEADER];
        bytes[..8].copy_from_slice(&MAP_MAGIC);
        bytes[8..12].copy_from_slice(&MAP_VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.unit.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.length.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.tail.to_le_bytes());
        bytes[32..48].copy_from_slice(&self.image);
        bytes[48..64].copy_from_slice(&self.boot);
        let checksum = crc32c::crc32c(&bytes[..MAP_HEADER - 4]);
        bytes[MAP_HEADER - 4..].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// The fields of a header, which are not checked.
    pub fn unchecked(bytes: &[u8; MAP_HEADER]) -> MapHeader {
        let half = |at: usize| {
            let mut field = [0; 16];
            field.copy_from_slice(&bytes[at..at + 16]);
            field
        };
        MapHeader {
            unit: (number(bytes, 8) >> 32) as u32,
            length: number(bytes, 16),
            tail: number(bytes, 24),
            image: half(32),
            boot: half(48),
        }
    }

    /// As read from a file of `found` bytes: the header, checked, and the
    /// file's length held against it.
    pub fn decode(bytes: &[u8; MAP_HEADER], found: u64) -> Result<MapHeader, MapError> {
        if bytes[..8] != MAP_MAGIC {
            return Err(MapError::NotAMap);
        }
        let version = number(bytes, 8) as u32;
        if version != MAP_VERSION {
            return Err(MapError::Version(version));
        }
        if crc32c::crc32c(&bytes[..MAP_HEADER - 4]).to_le_bytes() != bytes[MAP_HEADER - 4..] {
            return Err(MapError::Checksum);
        }
        let header = MapHeader::unchecked(bytes);
        if !header.unit.is_power_of_two() || !(4 << 10..=2 << 20).contains(&header.unit) {
            return Err(MapError::Field(
                "its unit is not a power of two from 4 KiB to 2 MiB",
            ));
        }
        header.check_units()?;
        if header.tail > header.length {
            return Err(MapError::Field("its tail begins behind its end"));
        }
        if bytes[64..MAP_HEADER - 4].iter().any(|byte| *byte != 0) {
            return Err(MapError::Field("reserved bytes are not zero"));
        }
        let expected = header.file_bytes();
        if found != expected {
            return Err(MapError::Length { expected, found });
        }
        Ok(header)
    }
}

/// VMM to pager: put these bytes of the disk into the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChunkRequest {
    /// The VMM's own number for it, given back with the answer.
    pub id: u64,
    /// First byte.
    pub offset: u64,
    /// Bytes: 1 to [`REQUEST_BYTES_MAX`], within the disk.
    pub length: u64,
}

impl ChunkRequest {
    /// Said first on a connection: answers to it may be [`ChunkAnswer::Bytes`]. A pager
    /// that does not know it answers `Unavailable`, as it does to any request of no bytes.
    pub const TAKES_BYTES: ChunkRequest = ChunkRequest {
        id: 0,
        offset: 0,
        length: 0,
    };
}

/// Pager to VMM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChunkAnswer {
    /// All bytes are there, and their bits are set.
    Present {
        /// As in the request.
        id: u64,
    },
    /// The cache has no room for them. So many of the first bytes follow the line.
    Bytes {
        /// As in the request.
        id: u64,
        /// Bytes: 1 to [`ANSWER_BYTES_MAX`], no more than were asked for.
        length: usize,
    },
    /// Some of them cannot be had.
    Unavailable {
        /// As in the request.
        id: u64,
        /// The first such chunk; none if the request itself is wrong.
        chunk: Option<u32>,
        /// One sentence: which image, which chunk, from where, why.
        sentence: String,
    },
}

impl ChunkAnswer {
    /// Which request it answers.
    pub fn id(&self) -> u64 {
        match self {
            ChunkAnswer::Present { id }
            | ChunkAnswer::Bytes { id, .. }
            | ChunkAnswer::Unavailable { id, .. } => *id,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header() -> MapHeader {
        MapHeader {
            unit: 64 << 10,
            length: (5 << 20) + 512,
            tail: 5 << 20,
            image: *b"0123456789abcdef",
            boot: [0x42; 16],
        }
    }

    #[test]
    fn a_header_comes_back_and_every_flipped_bit_is_seen() {
        let good = header().encode();
        let length = header().file_bytes();
        assert_eq!((header().units(), length), (81, 128 + 16));
        assert_eq!(MapHeader::decode(&good, length), Ok(header()));
        for bit in 0..MAP_HEADER * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            MapHeader::decode(&bad, length).unwrap_err();
        }
        assert_eq!(
            MapHeader::decode(&good, length - 8),
            Err(MapError::Length {
                expected: length,
                found: length - 8
            })
        );
    }

    /// The bytes of version 1, as `docs/disk-cache.md` has them. If this
    /// fails, files written before can't be read: raise the version.
    #[test]
    fn version_1_does_not_drift() {
        let golden = include_bytes!("../golden/present-1");
        let (head, bits) = golden.split_first_chunk().unwrap();
        assert_eq!(
            MapHeader::decode(head, golden.len() as u64),
            Ok(header()),
            "the golden map is read"
        );
        assert_eq!(*head, header().encode(), "and written as it was");
        assert_eq!(
            bits,
            [0b101, 0, 0, 0, 0, 0, 0, 0x80, 1, 0, 0, 0, 0, 0, 0, 0]
        );
    }

    /// As `docs/disk-cache.md` has them, and VMMs and pagers of other releases.
    #[test]
    fn what_came_after_0_1_does_not_drift() {
        let says = |line: &str, answer: &ChunkAnswer| {
            assert_eq!(serde_json::to_string(answer).unwrap(), line);
            assert_eq!(&serde_json::from_str::<ChunkAnswer>(line).unwrap(), answer);
        };
        let (id, length) = (7, 65536);
        says(
            r#"{"bytes":{"id":7,"length":65536}}"#,
            &ChunkAnswer::Bytes { id, length },
        );
        let takes = serde_json::to_string(&ChunkRequest::TAKES_BYTES).unwrap();
        assert_eq!(takes, r#"{"id":0,"offset":0,"length":0}"#);
    }

    #[test]
    fn senseless_fields_are_refused_even_with_a_right_checksum() {
        let refused = |change: fn(&mut MapHeader)| {
            let mut bad = header();
            change(&mut bad);
            MapHeader::decode(&bad.encode(), bad.length).unwrap_err()
        };
        let field = |error| matches!(error, MapError::Field(_));
        assert!(field(refused(|header| header.unit = 4097)));
        assert!(field(refused(|header| header.unit = 4 << 20)));
        assert!(field(refused(|header| header.unit = 0x800)));
        assert!(field(refused(|header| {
            header.length = u64::MAX;
            header.tail = 0;
        })));
        assert!(field(refused(|header| header.tail = header.length + 1)));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_header_or_an_error(mut bytes in proptest::array::uniform32(any::<u32>()), found: u64, sealed: bool) {
            bytes[0] = u32::from_le_bytes(MAP_MAGIC[..4].try_into().unwrap());
            bytes[1] = u32::from_le_bytes(MAP_MAGIC[4..].try_into().unwrap());
            bytes[2] = MAP_VERSION;
            let mut raw = [0; MAP_HEADER];
            for (at, word) in raw.chunks_exact_mut(4).zip(bytes) {
                at.copy_from_slice(&word.to_le_bytes());
            }
            if sealed {
                let checksum = crc32c::crc32c(&raw[..124]);
                raw[124..].copy_from_slice(&checksum.to_le_bytes());
            }
            if let Ok(header) = MapHeader::decode(&raw, found) {
                prop_assert_eq!(header.encode(), raw);
                prop_assert_eq!(header.file_bytes(), found);
            }
        }
    }
}
