//! Fills an image's bytes into a VM's memory.

use super::Vm;
use crate::handshake::Region;
use crate::image::{Content, Unreadable};
use crate::scratch::{self, Scratch};
use jiffy_store::Decoder;
use jiffy_sys::mutex::read;
use jiffy_sys::userfaultfd::FillError;
use std::io;
use std::ops::Range;

/// Most bytes filled while the gate is locked (but at least a page), because an event has to wait
/// for it.
pub(crate) const PIECE: u64 = 64 << 10;
const PAGE: u64 = 4 << 10;

/// Why filling stopped.
#[derive(Debug)]
pub enum Stop {
    /// The VM's mappings are changing: read events and try again.
    Changing,
    /// The VM is gone.
    Gone,
    /// It failed, for this reason.
    Failed(String),
}

impl From<Unreadable> for Stop {
    fn from(error: Unreadable) -> Stop {
        Stop::Failed(error.0)
    }
}

/// Whether a fill met a page that existed already. The fill did not wake a thread that waits for
/// that page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct MetExisting(pub bool);

/// As long as the largest page, because UFFDIO_ZEROPAGE does not work on huge pages.
static ZEROS: [u8; 2 << 20] = [0; 2 << 20];

/// What to fill memory with.
#[derive(Clone, Copy)]
enum Fill<'a> {
    Bytes(&'a [u8]),
    Zero,
}

impl Vm {
    /// Fills one unit except pages that were given up, beginning near the byte at `first`.
    pub(crate) fn fill_unit(
        &self,
        unit: u64,
        first: Option<u64>,
        scratch: &mut Scratch,
    ) -> Result<MetExisting, Stop> {
        let start = unit * self.unit;
        let buffer = scratch::first(&mut scratch.chunks, self.unit as usize);
        let met = match self.read(start, &mut scratch.decoder, buffer)? {
            Content::Zero => self.fill_zero(start..start + self.unit)?,
            Content::Bytes { .. } => {
                let bytes = &*buffer;
                let piece = PIECE.max(self.layout.largest_page());
                let near = first.map_or(start, |first| first / piece * piece);
                let (before, rest) = bytes.split_at((near.max(start) - start) as usize);
                let (near_bytes, after) = rest.split_at(rest.len().min(piece as usize));
                let near = start + before.len() as u64;
                let mut met = self.fill_bytes(near, near_bytes)?;
                met.0 |= self.fill_bytes(start, before)?.0;
                met.0 |= self.fill_bytes(near + near_bytes.len() as u64, after)?.0;
                met
            }
        };
        self.filled.set(unit);
        Ok(met)
    }

    /// Reads whole chunks; [`Content::Zero`] if all of them are zero.
    fn read(
        &self,
        start: u64,
        decoder: &mut Decoder,
        buffer: &mut [u8],
    ) -> Result<Content, Unreadable> {
        let size = self.image.chunk_size();
        let alone = buffer.len() == size;
        let mut sum = None;
        for (index, bytes) in buffer.chunks_mut(size).enumerate() {
            let start = start + (index * size) as u64;
            let content = if start < self.image.size() {
                self.image
                    .read(decoder, (start / size as u64) as u32, bytes)?
            } else {
                Content::Zero
            };
            match content {
                Content::Zero if alone => {}
                Content::Zero => bytes.fill(0),
                Content::Bytes { read } => *sum.get_or_insert(0) += read,
            }
        }
        Ok(match sum {
            None => Content::Zero,
            Some(read) => {
                self.counters.read(read);
                Content::Bytes { read }
            }
        })
    }

    /// Fills bytes that begin at `start` in the image into memory, except pages that were given up
    /// or exist already.
    pub(crate) fn fill_bytes(&self, start: u64, bytes: &[u8]) -> Result<MetExisting, Stop> {
        let mut met = MetExisting(false);
        for (part, region) in self.layout.parts(start..start + bytes.len() as u64) {
            let bytes = &bytes[(part.start - start) as usize..(part.end - start) as usize];
            met.0 |= self.fill_part(part, region, Fill::Bytes(bytes))?.0;
        }
        Ok(met)
    }

    /// Like [`Vm::fill_bytes`], with zeros.
    pub(crate) fn fill_zero(&self, range: Range<u64>) -> Result<MetExisting, Stop> {
        let mut met = MetExisting(false);
        for (part, region) in self.layout.parts(range) {
            met.0 |= self.fill_part(part, region, Fill::Zero)?.0;
        }
        Ok(met)
    }

    /// Marks a unit that was filled by [`Vm::fill_bytes`].
    pub(crate) fn mark_filled(&self, unit: u64) {
        self.filled.set(unit);
    }

    /// Fills a page that was given up with zeros.
    pub(super) fn fill_removed(&self, page: Range<u64>) -> Result<MetExisting, Stop> {
        let mut met = MetExisting(false);
        for (page, region) in self.layout.parts(page) {
            let run = self.removed_around(&page, region);
            met.0 |= self.fill_run(run, region, Fill::Zero)?.0;
        }
        Ok(met)
    }

    /// Wakes the threads that wait for one page; if it is missing, they fault again.
    pub(super) fn wake(&self, page: Range<u64>) {
        for (page, region) in self.layout.parts(page) {
            let address = region.address + (page.start - region.offset);
            // It fails only for a VM that is gone or has unmapped the page.
            let _ = self.uffd.wake(address, page.end - page.start);
        }
    }

    /// The run of given-up pages around one, within its unit and region.
    fn removed_around(&self, page: &Range<u64>, region: &Region) -> Range<u64> {
        let unit = page.start / self.unit * self.unit;
        let low = unit.max(region.offset);
        let high = (unit + self.unit).min(region.offset + region.size);
        let (mut start, mut end) = (page.start, page.end);
        while start > low && self.removed.contains(start - region.page) {
            start -= region.page;
        }
        while end < high && self.removed.contains(end) {
            end += region.page;
        }
        start..end
    }

    fn fill_part(
        &self,
        part: Range<u64>,
        region: &Region,
        what: Fill,
    ) -> Result<MetExisting, Stop> {
        let mut met = MetExisting(false);
        let piece = PIECE.max(region.page);
        let mut at = part.start;
        while at < part.end {
            let until = part.end.min((at / piece + 1) * piece);
            let _gate = read(&self.gate);
            let mut run = at;
            while run < until {
                let end = self.removed.run_end(run, until);
                if !self.removed.contains(run) {
                    let what = match what {
                        Fill::Bytes(bytes) => Fill::Bytes(
                            &bytes[(run - part.start) as usize..(end - part.start) as usize],
                        ),
                        Fill::Zero => Fill::Zero,
                    };
                    met.0 |= self.fill_run(run..end, region, what)?.0;
                }
                run = end;
            }
            at = until;
        }
        Ok(met)
    }

    /// Fills the missing pages of a range, in one call if possible.
    fn fill_run(
        &self,
        range: Range<u64>,
        region: &Region,
        what: Fill,
    ) -> Result<MetExisting, Stop> {
        let mut met = MetExisting(false);
        let address = region.address + (range.start - region.offset);
        let length = range.end - range.start;
        let mut done = 0;
        // Reduced after an error that may concern only a part of the range.
        let mut most = length;
        while done < length {
            let next = most.min(length - done);
            let filled = match what {
                Fill::Bytes(bytes) => self.uffd.copy(
                    address + done,
                    &bytes[done as usize..(done + next) as usize],
                ),
                Fill::Zero => match self.uffd.zero(address + done, next) {
                    // UFFDIO_ZEROPAGE does not work on huge pages, so zeros are copied.
                    Err(FillError::Other(error))
                        if error.kind() == io::ErrorKind::InvalidInput && region.page > PAGE =>
                    {
                        let next = next.min(ZEROS.len() as u64);
                        self.uffd.copy(address + done, &ZEROS[..next as usize])
                    }
                    other => other,
                },
            };
            match filled {
                Ok(bytes) => {
                    self.counters.filled(bytes);
                    done += bytes;
                }
                Err(FillError::Exists) => {
                    met = MetExisting(true);
                    done += region.page;
                }
                Err(FillError::Changing) => return Err(Stop::Changing),
                Err(FillError::Gone) => return Err(Stop::Gone),
                // The range may have been split, or a part of it unmapped.
                Err(FillError::Unmapped) if next > region.page => most = region.page,
                Err(FillError::Unmapped) => done += region.page,
                Err(FillError::Other(error)) => {
                    return Err(Stop::Failed(format!(
                        "{next} bytes at {:#x} of the VM's memory cannot be filled: {error}",
                        range.start + done
                    )));
                }
            }
        }
        Ok(met)
    }
}
