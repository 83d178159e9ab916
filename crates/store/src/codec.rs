//! Compresses and decompresses chunks.
//!
//! LZ4 is the C library: on one core it decompresses RAM at about twice the speed of the Rust one.
//! Checksums of chunks are computed by carry-less multiplication, three times as fast as with the
//! CRC-32C instruction.

use crate::format::Kind;
use crate::partial::blocks::{FETCH_MAX, Fetched, Found, PartialFile};
use crate::stop::Stop;
use lz4::block::CompressionMode;
use std::ops::Range;
use zstd::zstd_safe::{CCtx, CDict, CParameter, DCtx, DDict};

/// How chunks are compressed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Codec {
    /// Chunks are stored raw.
    None,
    /// The fastest to write and to read.
    #[default]
    Lz4,
    /// As fast to read as `Lz4` and smaller, but several times slower to write.
    Lz4High,
    /// The smallest; the level is from 1 to 22.
    Zstd(i32),
}

/// Compresses chunks for one thread.
pub(crate) struct Encoder<'d> {
    codec: Codec,
    kind: Kind,
    zstd: Option<CCtx<'d>>,
    buffer: Vec<u8>,
}

impl<'d> Encoder<'d> {
    /// Chunks that do not fit into `limit` bytes stay raw.
    pub(crate) fn new(
        codec: Codec,
        dictionary: Option<&'d CDict<'d>>,
        limit: usize,
    ) -> Result<Encoder<'d>, &'static str> {
        let mut zstd = None;
        let mut kind = match codec {
            Codec::None => Kind::Raw,
            Codec::Lz4 | Codec::Lz4High => Kind::Lz4,
            Codec::Zstd(_) => Kind::Zstd,
        };
        if let Codec::Zstd(level) = codec {
            let mut context = CCtx::create();
            // The frame needs none of these fields: the entry has the size and the checksum, the
            // footer the dictionary.
            for parameter in [
                CParameter::CompressionLevel(level),
                CParameter::ContentSizeFlag(false),
                CParameter::DictIdFlag(false),
            ] {
                context
                    .set_parameter(parameter)
                    .map_err(zstd::zstd_safe::get_error_name)?;
            }
            if let Some(dictionary) = dictionary {
                context
                    .ref_cdict(dictionary)
                    .map_err(zstd::zstd_safe::get_error_name)?;
                kind = Kind::ZstdDictionary;
            }
            zstd = Some(context);
        }
        Ok(Encoder {
            codec,
            kind,
            zstd,
            buffer: vec![0; limit],
        })
    }

    /// How to store `chunk`, and the bytes to store.
    pub(crate) fn encode<'a>(&'a mut self, chunk: &'a [u8]) -> (Kind, &'a [u8]) {
        // Both codecs return an error as soon as the buffer is full.
        let packed = match (self.codec, &mut self.zstd) {
            (Codec::None, _) => None,
            (Codec::Lz4, _) => lz4::block::compress_to_buffer(
                chunk,
                Some(CompressionMode::DEFAULT),
                false,
                &mut self.buffer,
            )
            .ok(),
            (Codec::Lz4High, _) => lz4::block::compress_to_buffer(
                chunk,
                Some(CompressionMode::HIGHCOMPRESSION(9)),
                false,
                &mut self.buffer,
            )
            .ok(),
            (Codec::Zstd(_), Some(context)) => context.compress2(&mut self.buffer[..], chunk).ok(),
            (Codec::Zstd(_), None) => None,
        };
        match packed {
            Some(length) if length > 0 => (self.kind, &self.buffer[..length]),
            _ => (Kind::Raw, chunk),
        }
    }
}

/// Trains a dictionary on `samples`, which are concatenated and have these lengths; `None` if they
/// are too few or too alike.
pub(crate) fn train(samples: &[u8], lengths: &[usize]) -> Option<Vec<u8>> {
    /// The maximum that zstd's documentation recommends.
    const BYTES: usize = 110 << 10;
    zstd::dict::from_continuous(samples, lengths, BYTES).ok()
}

/// Decompresses chunks for one thread, of any image. Kept between chunks to avoid allocations.
pub struct Decoder {
    pub(crate) scratch: Vec<u8>,
    zstd: Option<DCtx<'static>>,
    /// Checked while chunks are fetched from an origin.
    pub stop: Stop,
    /// What was fetched for this thread, the latest at the end.
    fetched: Vec<Fetched>,
}

impl Decoder {
    /// Allocates nothing yet.
    pub const fn new() -> Decoder {
        Decoder {
            scratch: Vec::new(),
            zstd: None,
            stop: Stop::never(),
            fetched: Vec::new(),
        }
    }

    /// Keeps fetched bytes in memory, so that chunks are decompressed from there: at most as much
    /// as is fetched at once.
    pub(crate) fn keep_fetched(&mut self, fetched: Fetched) {
        self.fetched.push(fetched);
        let bytes = |fetched: &[Fetched]| fetched.iter().map(Fetched::len).sum::<usize>();
        while self.fetched.len() > 1 && bytes(&self.fetched) as u64 > FETCH_MAX {
            self.fetched.remove(0);
        }
    }

    /// The bytes of a range of a file, if they were fetched lately.
    pub(crate) fn find_fetched(&self, file: &PartialFile, range: &Range<u64>) -> Option<Found> {
        let newest_first = self.fetched.iter().rev();
        newest_first
            .flat_map(|fetched| fetched.find(file, range))
            .next()
    }

    /// Frees the memory of what was fetched.
    pub fn forget_fetched(&mut self) {
        self.fetched = Vec::new();
    }

    /// Grows its buffer for chunks of `chunk_size` bytes.
    pub fn grow(&mut self, chunk_size: usize) {
        if self.scratch.len() < chunk_size {
            self.scratch.resize(chunk_size, 0);
        }
    }

    /// Decompresses a chunk from its stored bytes, which have to fill `chunk` exactly.
    pub(crate) fn unpack(
        &mut self,
        kind: Kind,
        stored: &[u8],
        dictionary: Option<&DDict<'static>>,
        chunk: &mut [u8],
    ) -> Result<(), &'static str> {
        let length = match (kind, dictionary) {
            (Kind::Raw, _) => {
                if stored.len() == chunk.len() {
                    chunk.copy_from_slice(stored);
                }
                stored.len()
            }
            (Kind::Lz4, _) => {
                let size = i32::try_from(chunk.len()).ok();
                lz4::block::decompress_to_buffer(stored, size, chunk)
                    .map_err(|_| "it is not an LZ4 block")?
            }
            (Kind::Zstd, _) => self
                .zstd()
                .decompress(chunk, stored)
                .map_err(|_| "it is not a zstd frame")?,
            (Kind::ZstdDictionary, Some(dictionary)) => self
                .zstd()
                .decompress_using_ddict(chunk, stored, dictionary)
                .map_err(|_| "it is not a zstd frame")?,
            (Kind::ZstdDictionary, None) => return Err("its dictionary is missing"),
            (Kind::Zero | Kind::Parent | Kind::Backing, _) => {
                return Err("it has no bytes in this file");
            }
        };
        if length == chunk.len() {
            Ok(())
        } else {
            Err("its length is not that of a chunk")
        }
    }

    fn zstd(&mut self) -> &mut DCtx<'static> {
        self.zstd.get_or_insert_with(DCtx::create)
    }
}

impl Default for Decoder {
    fn default() -> Decoder {
        Decoder::new()
    }
}

/// Whether every byte is zero. Checks one cache line first: most chunks that are not zero differ
/// there.
pub fn is_zero(bytes: &[u8]) -> bool {
    let (head, rest) = bytes.split_at(bytes.len().min(64));
    head.iter().all(|byte| *byte == 0)
        && rest
            .chunks(512)
            .all(|part| part.iter().fold(0, |all, byte| all | byte) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nonzero_byte_is_detected_at_any_position() {
        for length in [0, 1, 63, 64, 65, 600, 4096] {
            let mut bytes = vec![0; length];
            assert!(is_zero(&bytes));
            for at in 0..length {
                bytes[at] = 1;
                assert!(!is_zero(&bytes), "{at} of {length}");
                bytes[at] = 0;
            }
        }
    }

    #[test]
    fn every_codec_round_trips_and_refuses_wrong_input() {
        let chunk: Vec<u8> = (0..8192_u32).map(|n| (n / 100) as u8).collect();
        for codec in [Codec::Lz4, Codec::Lz4High, Codec::Zstd(1), Codec::Zstd(19)] {
            let mut encoder = Encoder::new(codec, None, 4096).unwrap();
            let (kind, stored) = encoder.encode(&chunk);
            assert_ne!(kind, Kind::Raw);
            let mut decoder = Decoder::new();
            let mut out = vec![1; 8192];
            decoder.unpack(kind, stored, None, &mut out).unwrap();
            assert_eq!(out, chunk);
            for wrong in [4096, 8191, 8193, 16384] {
                let mut out = vec![1; wrong];
                decoder.unpack(kind, stored, None, &mut out).unwrap_err();
            }
            for cut in 0..stored.len() {
                decoder
                    .unpack(kind, &stored[..cut], None, &mut out)
                    .unwrap_err();
            }
        }
    }

    #[test]
    fn a_poorly_compressible_chunk_stays_raw() {
        let mut state = 1_u64;
        let noise: Vec<u8> = (0..8192)
            .map(|_| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
                (state >> 56) as u8
            })
            .collect();
        for codec in [Codec::None, Codec::Lz4, Codec::Lz4High, Codec::Zstd(3)] {
            let mut encoder = Encoder::new(codec, None, 4096).unwrap();
            assert_eq!(encoder.encode(&noise), (Kind::Raw, &noise[..]));
        }
    }
}
