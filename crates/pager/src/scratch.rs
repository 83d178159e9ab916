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
    /// Allocates buffers of these sizes and touches their pages: for one chunk, for all chunks at
    /// once, and for bytes of the file. Growing them later takes longer than serving a fault.
    pub(crate) fn in_memory(chunk: usize, chunks: usize, stored: usize) -> Scratch {
        let mut decoder = Decoder::new();
        decoder.grow(chunk);
        // Filled with a value other than zero: zeroed pages would only be allocated when they are
        // used.
        Scratch {
            decoder,
            chunks: vec![1; chunks],
            stored: vec![1; stored],
        }
    }
}

/// The first bytes of a buffer, which grows if necessary; the contents are unspecified.
pub(crate) fn first(buffer: &mut Vec<u8>, bytes: usize) -> &mut [u8] {
    if buffer.len() < bytes {
        buffer.resize(bytes, 0);
    }
    &mut buffer[..bytes]
}
