//! Streams file contents into the image while the archive is read.

use super::format::{BLOCK_SIZE, MAX_TAIL_INLINE};
use crate::tree::Content;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use thiserror::Error;

/// Contents can't be written.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum WriteError {
    /// The image would grow over its limit, in bytes.
    #[error("the image would grow over its limit of {0} bytes")]
    OverLimit(u64),
    /// The host's file system refused.
    #[error("the image could not be written")]
    Io(#[from] io::Error),
}

/// Whole blocks go straight to their place in the image; tails wait in a
/// spool file until their inodes are placed, so memory stays small.
pub struct ContentWriter {
    image: File,
    spool: File,
    next_block: u32,
    spool_len: u64,
    limit: u64,
    buffer: Vec<u8>,
}

impl ContentWriter {
    /// Writes to `image` from block 1; `spool` is scratch space; neither
    /// grows over `limit` bytes.
    pub fn new(image: File, spool: File, limit: u64) -> ContentWriter {
        ContentWriter {
            image,
            spool,
            next_block: 1,
            spool_len: 0,
            limit: limit.min(u64::from(u32::MAX) * BLOCK_SIZE),
            buffer: vec![0; 32 * BLOCK_SIZE as usize],
        }
    }

    /// Stores `size` bytes given by `read`, which fills a buffer as far as it
    /// can. `beside_inode` is what else must share the tail's block: the
    /// inode's attributes.
    pub fn store<E: From<WriteError>>(
        &mut self,
        size: u64,
        beside_inode: u64,
        mut read: impl FnMut(&mut [u8]) -> Result<usize, E>,
    ) -> Result<Content, E> {
        let tail = size % BLOCK_SIZE;
        let inline = tail + beside_inode <= MAX_TAIL_INLINE;
        let blocks = if inline {
            size / BLOCK_SIZE
        } else {
            size.div_ceil(BLOCK_SIZE)
        };
        let first_block = self.reserve(blocks)?;
        let mut buffer = std::mem::take(&mut self.buffer);
        let mut offset = 0;
        while offset < size {
            let want = (size - offset).min(buffer.len() as u64) as usize;
            let mut filled = 0;
            while filled < want {
                filled += read(&mut buffer[filled..want])?;
            }
            let whole = if inline && offset + want as u64 == size {
                want - tail as usize
            } else {
                want
            };
            let at = u64::from(first_block) * BLOCK_SIZE + offset;
            self.write_image(&buffer[..whole], at)?;
            if whole < want {
                self.write_spool(&buffer[whole..want])?;
            }
            offset += want as u64;
        }
        self.buffer = buffer;
        let tail_len = if inline { tail as u16 } else { 0 };
        Ok(Content {
            size,
            first_block,
            tail_offset: self.spool_len - u64::from(tail_len),
            tail_len,
        })
    }

    /// Takes that many blocks in a row.
    pub(super) fn reserve(&mut self, blocks: u64) -> Result<u32, WriteError> {
        let first = self.next_block;
        let end = u64::from(first)
            .checked_add(blocks)
            .filter(|end| *end <= self.limit / BLOCK_SIZE)
            .ok_or(WriteError::OverLimit(self.limit))?;
        self.next_block = end as u32;
        Ok(first)
    }

    /// Runs of zeros stay holes in the image file.
    pub(super) fn write_image(&self, bytes: &[u8], at: u64) -> Result<(), WriteError> {
        if bytes.iter().any(|byte| *byte != 0) {
            self.image.write_all_at(bytes, at)?;
        }
        Ok(())
    }

    fn write_spool(&mut self, bytes: &[u8]) -> Result<(), WriteError> {
        if self.spool_len + bytes.len() as u64 > self.limit {
            return Err(WriteError::OverLimit(self.limit));
        }
        self.spool.write_all_at(bytes, self.spool_len)?;
        self.spool_len += bytes.len() as u64;
        Ok(())
    }

    pub(super) fn read_tail(&self, content: &Content, into: &mut Vec<u8>) -> io::Result<()> {
        let start = into.len();
        into.resize(start + usize::from(content.tail_len), 0);
        self.spool
            .read_exact_at(&mut into[start..], content.tail_offset)
    }

    pub(super) fn set_len(&self, bytes: u64) -> io::Result<()> {
        self.image.set_len(bytes)
    }
}
