//! Disks that are filled on demand: the map of stored chunks, and the protocol by which a VMM
//! requests missing chunks from a pager.
//!
//! A disk cache is a folder with the file `contents`, which is sparse and as long as the disk, and
//! the map `present` ([`MapHeader`], then a bit for each chunk). A bit is set after the bytes were
//! written. VMMs map `present` read-only and read `contents`; only the pager writes them.
//!
//! For missing chunks a VMM connects to the disk's socket and sends [`ChunkRequest`]s, one per line
//! as JSON. Each is answered with one [`ChunkAnswer`] per line, in any order. If the VMM began with
//! [`ChunkRequest::TAKES_BYTES`], an answer may carry bytes. `docs/disk-cache.md` describes the
//! protocol.

use serde::{Deserialize, Serialize};

/// File with the disk's bytes in a cache's folder.
pub const CONTENTS: &str = "contents";
/// File with the map in a cache's folder.
pub const PRESENT: &str = "present";

/// Size of a map's header, bytes; the bits follow.
pub const MAP_HEADER: usize = 128;
/// Magic number at the beginning of a map.
pub const MAP_MAGIC: [u8; 8] = *b"\x89JIFMAP\n";
/// Version that is written, and the only one that is read.
pub const MAP_VERSION: u32 = 1;
/// Most units of a map; their numbers fit in 32 bits.
pub const MAP_UNITS_MAX: u64 = u32::MAX as u64;

/// Longest line of a request or an answer, bytes.
pub const LINE_MAX: usize = 4096;
/// Most bytes of one request.
pub const REQUEST_BYTES_MAX: u64 = 64 << 20;
/// Most bytes in one answer.
pub const ANSWER_BYTES_MAX: usize = 256 << 10;

/// The first 128 bytes of a map. Disk caches use this format for their chunks, and incomplete
/// images for their blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MapHeader {
    /// Bytes per bit: a power of two from 4 KiB to 2 MiB.
    pub unit: u32,
    /// Bytes of the file that the map describes. The last unit may be shorter.
    pub length: u64,
    /// Offset from which all bytes are present; equals `length` if there is no such part.
    pub tail: u64,
    /// Id of the image from which the bytes come.
    pub image: [u8; 16],
    /// Boot id of the host that set bits last. Bits of another boot are not valid, because they may
    /// have reached the disk before their bytes. Zeros if everything was synced since; the bits are
    /// then always valid.
    pub boot: [u8; 16],
}

/// Why bytes are not a valid map.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MapError {
    /// It has no magic number.
    #[error("it is not a map: there is no magic at byte 0")]
    NotAMap,
    /// Its format version is unknown.
    #[error("the map has format version {0} (at byte 8); this program reads version {MAP_VERSION}")]
    Version(u32),
    /// Its checksum is wrong.
    #[error("the map is damaged: the checksum at byte 124 is wrong")]
    Checksum,
    /// A field contradicts the format.
    #[error("the map is damaged: {0}")]
    Field(&'static str),
    /// The file's length does not match its number of bits.
    #[error("the map has {found} bytes instead of {expected}")]
    Length {
        /// Length according to the header, bytes.
        expected: u64,
        /// Length of the file, bytes.
        found: u64,
    },
}

fn number(bytes: &[u8; MAP_HEADER], at: usize) -> u64 {
    let mut field = [0; 8];
    field.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(field)
}

impl MapHeader {
    /// Number of units.
    pub fn units(&self) -> u64 {
        self.length.div_ceil(u64::from(self.unit))
    }

    /// Checks the number of units.
    ///
    /// # Errors
    ///
    /// If there are more than [`MAP_UNITS_MAX`] units.
    pub fn check_units(&self) -> Result<(), MapError> {
        match self.units() > MAP_UNITS_MAX {
            true => Err(MapError::Field("it has more than 2^32 - 1 units")),
            false => Ok(()),
        }
    }

    /// Length of the whole file: header and bits, padded to 64-bit words.
    pub fn file_bytes(&self) -> u64 {
        MAP_HEADER as u64 + self.units().div_ceil(64) * 8
    }

    /// Encodes the header.
    pub fn encode(&self) -> [u8; MAP_HEADER] {
        let mut bytes = [0; MAP_HEADER];
        bytes[..8].copy_from_slice(&MAP_MAGIC);
        bytes[8..12].copy_from_slice(&MAP_VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.unit.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.length.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.tail.to_le_bytes());
        bytes[32..48].copy_from_slice(&self.image);
        bytes[48..64].copy_from_slice(&self.boot);
        let checksum = crc_fast::crc32_iscsi(&bytes[..MAP_HEADER - 4]);
        bytes[MAP_HEADER - 4..].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Decodes the fields of a header without checks.
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

    /// Decodes the header of a file of `found` bytes; checks the header and the file's length.
    ///
    /// # Errors
    ///
    /// If the magic, the version or the checksum is wrong, a field contradicts the format, or the
    /// header gives another length than `found`.
    pub fn decode(bytes: &[u8; MAP_HEADER], found: u64) -> Result<MapHeader, MapError> {
        if bytes[..8] != MAP_MAGIC {
            return Err(MapError::NotAMap);
        }
        let version = number(bytes, 8) as u32;
        if version != MAP_VERSION {
            return Err(MapError::Version(version));
        }
        if crc_fast::crc32_iscsi(&bytes[..MAP_HEADER - 4]).to_le_bytes() != bytes[MAP_HEADER - 4..]
        {
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

/// Request of a VMM: store these bytes of the disk in the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChunkRequest {
    /// Number chosen by the VMM, which the answer repeats.
    pub id: u64,
    /// Offset of the first byte in the disk, bytes.
    pub offset: u64,
    /// Length, bytes: 1 to [`REQUEST_BYTES_MAX`], within the disk.
    pub length: u64,
}

impl ChunkRequest {
    /// First message on a connection: answers on it may be [`ChunkAnswer::Bytes`]. A pager that
    /// does not know this message answers `Unavailable`, as to any request of zero bytes.
    pub const TAKES_BYTES: ChunkRequest = ChunkRequest {
        id: 0,
        offset: 0,
        length: 0,
    };
}

/// Answer of a pager.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChunkAnswer {
    /// All bytes are in the cache, and their bits are set.
    Present {
        /// As in the request.
        id: u64,
    },
    /// The cache has no space for them. `length` bytes from the request's offset follow the line.
    Bytes {
        /// As in the request.
        id: u64,
        /// Length, bytes: 1 to [`ANSWER_BYTES_MAX`], at most that of the request.
        length: usize,
    },
    /// Some of the bytes are not available.
    Unavailable {
        /// As in the request.
        id: u64,
        /// The first such chunk; `None` if the request itself is wrong.
        chunk: Option<u32>,
        /// One sentence: which image and chunk, from which origin, and why.
        sentence: String,
    },
}

impl ChunkAnswer {
    /// Number of the answered request.
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
    fn a_header_round_trips_and_every_flipped_bit_is_detected() {
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

    /// The bytes of version 1 in `docs/disk-cache.md`. If this test fails, existing files can't be
    /// read: raise the version.
    #[test]
    fn the_version_1_format_does_not_change() {
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

    /// The messages in `docs/disk-cache.md`, which VMMs and pagers of other releases use.
    #[test]
    fn messages_added_after_0_1_do_not_change() {
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
    fn invalid_fields_with_a_valid_checksum_are_refused() {
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
        fn any_bytes_decode_to_a_header_or_an_error(mut bytes in proptest::array::uniform32(any::<u32>()), found: u64, sealed: bool) {
            bytes[0] = u32::from_le_bytes(MAP_MAGIC[..4].try_into().unwrap());
            bytes[1] = u32::from_le_bytes(MAP_MAGIC[4..].try_into().unwrap());
            bytes[2] = MAP_VERSION;
            let mut raw = [0; MAP_HEADER];
            for (at, word) in raw.chunks_exact_mut(4).zip(bytes) {
                at.copy_from_slice(&word.to_le_bytes());
            }
            if sealed {
                let checksum = crc_fast::crc32_iscsi(&raw[..124]);
                raw[124..].copy_from_slice(&checksum.to_le_bytes());
            }
            if let Ok(header) = MapHeader::decode(&raw, found) {
                prop_assert_eq!(header.encode(), raw);
                prop_assert_eq!(header.file_bytes(), found);
            }
        }
    }
}
