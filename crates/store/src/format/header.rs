//! The first 64 bytes: magic, version and sizes.

use super::{Fields, Record, VERSION, VERSIONS, chunks, is_chunk_size, is_sealed};
use crate::error::Fault;

/// Bytes of a header.
pub const BYTES: usize = 64;
/// The first bytes of every image. Text conversions and 7-bit paths damage it.
pub const MAGIC: [u8; 8] = *b"\x89JIFFY\r\n";

/// The first 64 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Bytes of a chunk.
    pub chunk_size: u32,
    /// Bytes of the contents.
    pub size: u64,
}

impl Header {
    /// The encoded header.
    pub fn encode(&self) -> [u8; BYTES] {
        Record::new()
            .put(&MAGIC)
            .u32(VERSION)
            .u32(self.chunk_size)
            .u64(self.size)
            .seal()
    }

    /// Decodes a header.
    ///
    /// # Errors
    ///
    /// If the magic, version or checksum is wrong, or a field contradicts the format.
    pub fn decode(bytes: &[u8; BYTES]) -> Result<Header, Fault> {
        let mut fields = Fields(bytes);
        if fields.array() != MAGIC {
            return Err(Fault::NotAnImage);
        }
        let found = fields.u32();
        if found != VERSION {
            return Err(Fault::Version {
                found,
                known: VERSIONS,
                offset: 8,
            });
        }
        if !is_sealed(bytes) {
            return Err(damaged(0, "the header's checksum is wrong"));
        }
        let header = Header {
            chunk_size: fields.u32(),
            size: fields.u64(),
        };
        if !is_chunk_size(header.chunk_size) {
            return Err(damaged(
                12,
                "the chunk size is not a power of two from 4 KiB to 2 MiB",
            ));
        }
        if chunks(header.size, header.chunk_size).is_none() {
            return Err(damaged(16, "there are more than 2^32 - 1 chunks"));
        }
        if bytes[24..BYTES - 4].iter().any(|byte| *byte != 0) {
            return Err(damaged(24, "reserved bytes are not zero"));
        }
        Ok(header)
    }
}

fn damaged(offset: u64, what: &'static str) -> Fault {
    Fault::Damaged { offset, what }
}
