//! The chunks that a restore touched, in order. The file has a header of 40 bytes, the chunks'
//! numbers with 32 bits each, and a CRC-32C of all before it.

use crate::format::{Fields, ImageId, MAX_CHUNK, is_sealed, seal};
use std::fs;
use std::io;
use std::path::Path;

/// The first bytes of every recording.
pub const MAGIC: [u8; 8] = *b"\x89JIFREC\n";
/// The version written and the only one read.
pub const VERSION: u32 = 1;
const HEADER: usize = 40;

/// Which chunks of an image were touched, each once, in the order of first use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recording {
    /// The id of the image.
    pub image: ImageId,
    /// Bytes of a chunk.
    pub chunk_size: u32,
    /// The chunks.
    pub chunks: Vec<u32>,
}

impl Recording {
    /// Writes the recording under a temporary name, syncs and renames it.
    ///
    /// # Errors
    ///
    /// If the file can't be written, synced or renamed.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        jiffy_sys::durable::replace(path, &self.encode())
    }

    /// Reads a recording.
    ///
    /// # Errors
    ///
    /// If the file can't be read. `InvalidData`, with a sentence, if it is not a valid recording.
    pub fn read(path: &Path) -> io::Result<Recording> {
        Recording::decode(&fs::read(path)?)
            .map_err(|sentence| io::Error::new(io::ErrorKind::InvalidData, sentence))
    }

    /// The encoded recording.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(self.chunk_size.to_le_bytes());
        bytes.extend(self.image.0);
        bytes.extend((self.chunks.len() as u64).to_le_bytes());
        bytes.extend(self.chunks.iter().flat_map(|index| index.to_le_bytes()));
        bytes.extend([0; 4]);
        seal(&mut bytes);
        bytes
    }

    /// Decodes a recording.
    ///
    /// # Errors
    ///
    /// If the magic, version, length, checksum or chunk size is wrong: a sentence.
    pub fn decode(bytes: &[u8]) -> Result<Recording, String> {
        let mut fields = Fields(bytes);
        if fields.array() != MAGIC {
            return Err("it is not a recording: there is no magic at byte 0".into());
        }
        let found = fields.u32();
        if found != VERSION {
            return Err(format!(
                "the recording has format version {found} (at byte 8); this program reads \
                 version {VERSION}"
            ));
        }
        let chunk_size = fields.u32();
        let image = ImageId(fields.array());
        let count = fields.u64();
        let length = bytes.len() as u64;
        if count
            .checked_mul(4)
            .and_then(|all| all.checked_add(HEADER as u64 + 4))
            != Some(length)
        {
            return Err(format!(
                "the recording is truncated: it has {length} bytes, for {count} chunks (at byte 32)"
            ));
        }
        if !is_sealed(bytes) {
            return Err(format!(
                "the recording is damaged: its checksum at byte {} is wrong",
                length - 4
            ));
        }
        if chunk_size > MAX_CHUNK {
            return Err("the recording's chunk size at byte 12 is wrong".into());
        }
        Ok(Recording {
            image,
            chunk_size,
            chunks: (0..count).map(|_| fields.u32()).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recording_survives_a_round_trip_and_damage_is_detected() {
        let recording = Recording {
            image: ImageId([7; 16]),
            chunk_size: 8192,
            chunks: vec![3, 1, 70000],
        };
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("r");
        recording.write(&path).unwrap();
        assert_eq!(Recording::read(&path).unwrap(), recording);
        let good = fs::read(&path).unwrap();
        assert_eq!(good.len(), HEADER + 3 * 4 + 4);
        for cut in 0..good.len() {
            Recording::decode(&good[..cut]).unwrap_err();
        }
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            Recording::decode(&bad).unwrap_err();
        }
    }
}
