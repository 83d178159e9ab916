//! The baseline: a sparse file as long as RAM, read page by page.

use crate::image::{ChunkImage, Content, Unreadable};
use jiffy_store::{Decoder, ImageId};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

pub(super) struct RawImage {
    file: File,
    size: u64,
    chunk_size: usize,
}

impl RawImage {
    /// Opens a file of bytes that are stored as they are, as chunks of `chunk_size` bytes.
    ///
    /// # Errors
    ///
    /// If the file can't be opened.
    pub fn open(path: &Path, chunk_size: usize) -> Result<RawImage, Unreadable> {
        let opened = File::open(path).and_then(|file| Ok((file.metadata()?.len(), file)));
        let (size, file) = opened.map_err(|error| Unreadable(error.to_string()))?;
        Ok(RawImage {
            file,
            size,
            chunk_size,
        })
    }
}

impl ChunkImage for RawImage {
    fn id(&self) -> ImageId {
        ImageId([0; 16])
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn chunk_size(&self) -> usize {
        self.chunk_size
    }

    fn read(&self, _: &mut Decoder, chunk: u32, bytes: &mut [u8]) -> Result<Content, Unreadable> {
        let offset = u64::from(chunk) * self.chunk_size as u64;
        let length = (self.size.saturating_sub(offset)).min(bytes.len() as u64) as usize;
        let (there, beyond) = bytes.split_at_mut(length);
        beyond.fill(0);
        self.file
            .read_exact_at(there, offset)
            .map_err(|error| Unreadable(error.to_string()))?;
        Ok(Content::Bytes {
            read: length as u64,
        })
    }
}
