//! Transfers through an aligned buffer, for direct I/O on guest buffers that are not
//! aligned.

use super::segment::Segment;
use super::vectored::Direction;
use crate::GuestMemory;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use vm_memory::{Bytes, GuestAddress};

/// Bytes transferred at a time; a multiple of every block size.
pub(crate) const CHUNK: usize = 128 * 1024;
/// Larger than any disk's alignment.
const ALIGNMENT: usize = 4096;

/// The buffer; allocated at its first use.
#[derive(Default)]
pub(crate) struct Bounce(Vec<u8>);

impl Bounce {
    /// Transfers all bytes of `segments` from or to `offset`.
    ///
    /// # Errors
    ///
    /// If the file is too short, or a system call fails.
    pub(crate) fn transfer(
        &mut self,
        file: &File,
        direction: Direction,
        mut offset: u64,
        memory: &GuestMemory,
        segments: &[Segment],
    ) -> io::Result<()> {
        let buffer = self.buffer();
        let mut left: u64 = segments.iter().map(|segment| segment.length as u64).sum();
        let mut cursor = Cursor::new(segments);
        while left > 0 {
            let count = left.min(CHUNK as u64);
            let chunk = &mut buffer[..count as usize];
            match direction {
                Direction::Read => {
                    file.read_exact_at(chunk, offset)?;
                    cursor.run(chunk, |part, address| memory.write_slice(part, address))?;
                }
                Direction::Write => {
                    cursor.run(chunk, |part, address| memory.read_slice(part, address))?;
                    file.write_all_at(chunk, offset)?;
                }
            }
            offset += count;
            left -= count;
        }
        Ok(())
    }

    /// Writes zeros.
    pub(crate) fn write_zeros(
        &mut self,
        file: &File,
        mut offset: u64,
        mut bytes: u64,
    ) -> io::Result<()> {
        let buffer = self.buffer();
        buffer.fill(0);
        while bytes > 0 {
            let count = bytes.min(CHUNK as u64);
            file.write_all_at(&buffer[..count as usize], offset)?;
            offset += count;
            bytes -= count;
        }
        Ok(())
    }

    fn buffer(&mut self) -> &mut [u8] {
        self.0.resize(CHUNK + ALIGNMENT, 0);
        let address = self.0.as_ptr().addr();
        let start = address.next_multiple_of(ALIGNMENT) - address;
        &mut self.0[start..start + CHUNK]
    }
}

/// A position in a list of segments.
struct Cursor<'a> {
    segments: &'a [Segment],
    /// Bytes of the first segment that are done.
    consumed: usize,
}

impl<'a> Cursor<'a> {
    fn new(segments: &'a [Segment]) -> Cursor<'a> {
        Cursor {
            segments,
            consumed: 0,
        }
    }

    /// Transfers between all of `chunk` and the guest memory that comes next.
    fn run(
        &mut self,
        mut chunk: &mut [u8],
        mut copy: impl FnMut(&mut [u8], GuestAddress) -> Result<(), vm_memory::GuestMemoryError>,
    ) -> io::Result<()> {
        while !chunk.is_empty() {
            let [segment, rest @ ..] = self.segments else {
                return Err(io::ErrorKind::UnexpectedEof.into());
            };
            let count = chunk.len().min(segment.length - self.consumed);
            let (part, later) = chunk.split_at_mut(count);
            let address = GuestAddress(segment.address.0 + self.consumed as u64);
            copy(part, address).map_err(io::Error::other)?;
            chunk = later;
            self.consumed += count;
            if self.consumed == segment.length {
                self.segments = rest;
                self.consumed = 0;
            }
        }
        Ok(())
    }
}
