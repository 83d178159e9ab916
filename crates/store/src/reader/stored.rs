//! The stored bytes of chunks, for those who read or copy them as they are, and the working set.

use super::{ImageReader, Place};
use crate::codec::Decoder;
use crate::error::{Fault, ImageError};
use crate::format::{Fields, Kind};
use crate::outline::read_section;
use crate::stop::Stop;
use std::ops::Range;

impl ImageReader {
    /// The range of this file that holds a chunk's bytes; `None` if it holds none.
    ///
    /// # Errors
    ///
    /// As for [`ImageReader::place`].
    pub fn stored_range(&self, index: u32) -> Result<Option<Range<u64>>, ImageError> {
        Ok(match self.place(index)? {
            Place::Entry(entry) if entry.kind.is_stored() => Some(entry.range()),
            _ => None,
        })
    }

    /// Decodes a chunk from the bytes of its [`ImageReader::stored_range`], which the caller has
    /// read, and checks it. A chunk without a stored range is read.
    ///
    /// # Errors
    ///
    /// If there is no such chunk, or `stored` is damaged; without a stored range, as for
    /// [`ImageReader::read_chunk`].
    ///
    /// # Panics
    ///
    /// If `chunk` has another length than [`ImageReader::chunk_size`].
    pub fn decode(
        &self,
        decoder: &mut Decoder,
        index: u32,
        stored: &[u8],
        chunk: &mut [u8],
    ) -> Result<(), ImageError> {
        self.assert_length(chunk);
        match self.place(index)? {
            Place::Entry(entry) if entry.kind.is_stored() => {
                self.unpack(decoder, index, &entry, stored, chunk)?;
                self.check(index, &entry, chunk)
            }
            _ => self.read_chunk_with(decoder, index, chunk),
        }
    }

    /// Checks the bytes of a raw chunk's [`ImageReader::stored_range`], which the caller has read.
    /// These bytes are the chunk itself.
    ///
    /// # Errors
    ///
    /// If there is no such chunk, it is not stored raw, or `stored` is damaged.
    pub fn check_raw(&self, index: u32, stored: &[u8]) -> Result<(), ImageError> {
        match self.place(index)? {
            Place::Entry(entry) if entry.kind == Kind::Raw => self.check(index, &entry, stored),
            _ => Err(self.failed(Fault::Chunk {
                index,
                offset: 0,
                what: "it is not stored raw",
            })),
        }
    }

    /// Reads bytes of the file: those of [`ImageReader::stored_range`] or
    /// [`ImageReader::hot_range`].
    ///
    /// # Errors
    ///
    /// If the bytes can't be read or fetched.
    pub fn read_stored(&self, offset: u64, bytes: &mut [u8]) -> Result<(), ImageError> {
        self.read_part(offset, bytes, &Stop::never())
    }

    /// Where this file has the chunks of the working set, contiguous and in its order, without zero
    /// chunks and duplicates; empty if there is no working set.
    pub fn hot_range(&self) -> Range<u64> {
        self.footer.hot.clone()
    }

    /// The chunks a restore needs, in the order it needs them.
    ///
    /// # Errors
    ///
    /// If the list can't be read, its checksum is wrong, or it has too many chunks or chunks beyond
    /// the last.
    pub fn working_set(&self) -> Result<Vec<Range<u32>>, ImageError> {
        let section = &self.footer.working_set;
        let damaged = |what| {
            let offset = section.offset;
            self.failed(Fault::Damaged { offset, what })
        };
        let bytes = read_section(&self.file, section).map_err(|fault| self.failed(fault))?;
        let mut fields = Fields(&bytes);
        let mut left = self.chunks();
        (0..bytes.len() / 8)
            .map(|_| {
                let (first, count) = (fields.u32(), fields.u32());
                left = left
                    .checked_sub(count)
                    .filter(|_| count > 0)
                    .ok_or_else(|| damaged("the working set has a wrong number of chunks"))?;
                match first.checked_add(count) {
                    Some(end) if end <= self.chunks() => Ok(first..end),
                    _ => Err(damaged("the working set has chunks beyond the last")),
                }
            })
            .collect()
    }
}
