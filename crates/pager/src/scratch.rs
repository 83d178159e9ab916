//! The buffers of one thread, kept from one chunk to the next.

use jiffy_store::Decoder;

/// Unpacks chunks and holds their bytes.
#[derive(Default)]
pub struct Scratch {
    /// Unpacks chunks.
    pub decoder: Decoder,
    /// For chunks.
    pub chunks: Vec<u8>,
    /// For bytes of an image's file.
    pub(crate) stored: Vec<u8>,
}

impl Scratch {
    /// With buffers that are in memory: so many bytes for one chunk, for all chunks at once,
    /// and of the file. To grow takes longer than to serve a fault, and somebody waits.
    pub(crate) fn in_memory(chunk: usize, chunks: usize, stored: usize) -> Scratch {
        let mut decoder = Decoder::new();
        decoder.grow(chunk);
        // Of zeroes the allocator would take pages that are made when they are used.
        Scratch {
            decoder,
            chunks: vec![1; chunks],
            stored: vec![1; stored],
        }
    }
}

/// The first bytes of a buffer that grows, with any contents.
pub(crate) fn first(buffer: &mut Vec<u8>, bytes: usize) -> &mut [u8] {
    if buffer.len() < bytes {
        buffer.resize(bytes, 0);
    }
    &mut buffer[..bytes]
}
