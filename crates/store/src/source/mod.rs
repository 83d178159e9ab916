//! Where the bytes of a new image come from.
//!
//! * [`file`](mod@file): any file; holes are skipped.
//! * [`layered`]: layered files, such as a captured VM's RAM.

pub mod file;
pub mod layered;

pub use layered::LayeredFile;

use std::io;
use std::ops::Range;

/// Bytes with random access, from several threads.
pub trait ChunkSource {
    /// Bytes it has.
    fn size(&self) -> u64;

    /// Fills `buffer` with the bytes from `offset` on. Bytes past the end are zeros.
    ///
    /// # Errors
    ///
    /// If the bytes can't be read.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()>;

    /// The ranges that may hold bytes that are not zero: sorted, without overlap.
    ///
    /// # Errors
    ///
    /// If the source can't say which ranges these are, such as when `lseek` fails.
    fn data_ranges(&self) -> io::Result<Vec<Range<u64>>> {
        let size = self.size();
        Ok((size > 0).then_some(0..size).into_iter().collect())
    }
}

/// Bytes in memory.
impl ChunkSource for [u8] {
    fn size(&self) -> u64 {
        self.len() as u64
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let start = usize::try_from(offset).map_or(self.len(), |start| start.min(self.len()));
        let count = buffer.len().min(self.len() - start);
        buffer[..count].copy_from_slice(&self[start..start + count]);
        buffer[count..].fill(0);
        Ok(())
    }
}

/// Bytes in memory.
impl ChunkSource for Vec<u8> {
    fn size(&self) -> u64 {
        self[..].size()
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self[..].read_at(offset, buffer)
    }
}
