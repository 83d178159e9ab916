//! The table of chunks, read as it is needed.

use super::Place;
use crate::error::Fault;
use crate::format::manifest::{ENTRY_BYTES, GROUP_BYTES, Limits};
use crate::format::{Entry, Footer, GROUP, Group, Section};
use crate::outline::read_exact;
use jiffy_sys::mutex::lock;
use std::fs::File;
use std::sync::{Mutex, OnceLock};

/// How many groups are cached: the table of 2 GiB in chunks of 8 KiB, in at most 7 MiB of memory.
/// Only groups that were touched take memory.
const CACHED_GROUPS: u32 = 4096;
/// Bytes of the table that are read at once and kept: 32 KiB for a GiB in chunks of 8 KiB.
const PART_BYTES: usize = 4 << 10;

pub(super) struct Groups {
    pub(super) chunks: u32,
    table: Section,
    entries: Section,
    limits: Limits,
    /// Group N is kept in slot N modulo their number.
    slots: Box<[Mutex<Option<Box<CachedGroup>>>]>,
    /// The parts of the table that were read.
    parts: Box<[OnceLock<Box<[u8]>>]>,
}

/// A group that was read and checked.
struct CachedGroup {
    number: u32,
    bitmap: u64,
    first: u32,
    entries: Box<[Entry]>,
}

impl Groups {
    pub(super) fn new(footer: &Footer, chunks: u32, limits: Limits) -> Groups {
        let slots = chunks.div_ceil(GROUP).min(CACHED_GROUPS);
        Groups {
            chunks,
            table: footer.groups,
            entries: footer.entries,
            limits,
            slots: (0..slots).map(|_| Mutex::new(None)).collect(),
            parts: std::iter::repeat_with(OnceLock::new)
                .take((footer.groups.length as usize).div_ceil(PART_BYTES))
                .collect(),
        }
    }

    /// Where a chunk's bytes are, and the number of its entry if it has one.
    pub(super) fn place(&self, file: &File, index: u32) -> Result<(Place, u32), Fault> {
        let chunks = self.chunks;
        if index >= chunks {
            return Err(Fault::NoSuchChunk { index, chunks });
        }
        let number = index / GROUP;
        let slot = &self.slots[(number % CACHED_GROUPS) as usize];
        let mut slot = lock(slot);
        let known = match &mut *slot {
            Some(known) if known.number == number => known,
            other => other.insert(Box::new(self.load(file, number)?)),
        };
        let bit = 1 << (index % GROUP);
        if known.bitmap & bit == 0 {
            return Ok((Place::Zero, 0));
        }
        let before = (known.bitmap & (bit - 1)).count_ones();
        let entry = known.entries[before as usize];
        Ok((Place::Entry(entry), known.first + before))
    }

    fn load(&self, file: &File, number: u32) -> Result<CachedGroup, Fault> {
        let offset = self.table.offset + u64::from(number) * GROUP_BYTES as u64;
        let damaged = |what| Fault::Damaged { offset, what };
        let group = Group::decode(&self.encoded(file, number)?);
        // There are at most as many entries as chunks, whose number fits.
        let count = (self.entries.length / ENTRY_BYTES as u64) as u32;
        let range = group
            .entries(number, self.chunks, count)
            .ok_or_else(|| damaged("a group has chunks or entries that do not exist"))?;
        let mut bytes = [0; GROUP as usize * ENTRY_BYTES];
        let bytes = &mut bytes[..range.len() * ENTRY_BYTES];
        let at = u64::from(range.start) * ENTRY_BYTES as u64;
        read_exact(file, self.entries.offset + at, bytes)?;
        let entries = group
            .decode_entries(number, bytes, &self.limits)
            .map_err(damaged)?;
        Ok(CachedGroup {
            number,
            bitmap: group.bitmap,
            first: group.first,
            entries: entries.into(),
        })
    }

    /// A group as it is in the file.
    fn encoded(&self, file: &File, number: u32) -> Result<[u8; GROUP_BYTES], Fault> {
        let at = number as usize * GROUP_BYTES;
        let part = &self.parts[at / PART_BYTES];
        let bytes = match part.get() {
            Some(bytes) => bytes,
            None => {
                let begin = at / PART_BYTES * PART_BYTES;
                let length = PART_BYTES.min(self.table.length as usize - begin);
                let mut bytes = vec![0; length];
                read_exact(file, self.table.offset + begin as u64, &mut bytes)?;
                part.get_or_init(|| bytes.into())
            }
        };
        let mut group = [0; GROUP_BYTES];
        group.copy_from_slice(&bytes[at % PART_BYTES..at % PART_BYTES + GROUP_BYTES]);
        Ok(group)
    }
}
