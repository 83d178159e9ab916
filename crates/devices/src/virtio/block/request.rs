//! Reads requests from guest memory and checks them (Virtio 1.3 §5.2.6).
//!
//! A request is a chain of buffers: first those that the device reads (a header of 16 bytes, then
//! data), then those that it writes (data, then one status byte). Boundaries between buffers have
//! no meaning (§2.7.4).

use super::{DISCARD_SECTORS_MAX, RANGES_MAX, SECTOR, SEGMENTS_MAX, WRITE_ZEROES_SECTORS_MAX};
use crate::GuestMemory;
use crate::virtio::queue::chain::{Chain, Walk};
use crate::virtio::queue::limit::Cost;
use crate::virtio::queue::segment::{Region, Segment};
use std::ops::Range;
use thiserror::Error;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH,
    VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
    VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};
use vm_memory::{Bytes, GuestAddress};

const HEADER_BYTES: usize = 16;
const RANGE_BYTES: usize = 16;

/// An operation of the driver. Ranges of the disk are checked not to overflow, but not against its
/// size yet.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Operation {
    /// Read from this byte of the disk into the data segments.
    Read(u64),
    /// Write the data segments to this byte of the disk.
    Write(u64),
    /// Make writes durable.
    Flush,
    /// Read the disk's identity into the data segments.
    Identify,
    /// These ranges are no longer needed.
    Discard(Ranges),
    /// Zero these ranges.
    WriteZeroes(Ranges),
}

/// Ranges of a discard or write-zeroes request.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Ranges {
    ranges: [ZeroRange; RANGES_MAX],
    count: usize,
}

/// One range.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ZeroRange {
    /// Bytes of the disk.
    pub(super) bytes: Range<u64>,
    /// Whether blocks may be released to the file system.
    pub(super) unmap: bool,
}

impl Ranges {
    pub(super) fn as_slice(&self) -> &[ZeroRange] {
        &self.ranges[..self.count]
    }
}

/// A checked request.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) operation: Operation,
    /// Address of the status byte.
    pub(super) status: GuestAddress,
    /// Bytes of the data segments.
    pub(super) data_bytes: u64,
}

impl Request {
    /// Its cost for rate limits.
    pub(super) fn cost(&self) -> Cost {
        match self.operation {
            Operation::Identify => Cost::default(),
            Operation::Read(_) | Operation::Write(_) => Cost {
                operations: 1,
                bytes: self.data_bytes,
            },
            Operation::Flush | Operation::Discard(_) | Operation::WriteZeroes(_) => Cost {
                operations: 1,
                bytes: 0,
            },
        }
    }
}

/// Why a chain is not a valid request.
#[derive(Debug, Error, PartialEq, Eq)]
pub(super) enum Refused {
    /// It has no status byte, so it can't be answered.
    #[error("a block request without a status byte")]
    NoStatus,
    /// It is malformed, or asks for something impossible.
    #[error("a malformed block request")]
    Malformed(GuestAddress),
    /// Its type is unknown.
    #[error("a block request of an unknown kind")]
    Unsupported(GuestAddress),
}

impl Refused {
    /// The status to answer with, and where.
    pub(super) fn status(&self) -> Option<(GuestAddress, u8)> {
        match self {
            Refused::NoStatus => None,
            Refused::Malformed(address) => Some((*address, VIRTIO_BLK_S_IOERR as u8)),
            Refused::Unsupported(address) => Some((*address, VIRTIO_BLK_S_UNSUPP as u8)),
        }
    }
}

/// The buffers of the current request; reused for the next one.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    readable: Vec<Segment>,
    writable: Vec<Segment>,
}

impl Buffers {
    /// Parses a chain. On success the data segments are those of
    /// [`readable_data`](Buffers::readable_data) or [`writable_data`](Buffers::writable_data).
    pub(super) fn parse(&mut self, memory: &GuestMemory, chain: Chain) -> Result<Request, Refused> {
        let gathered = self.gather(memory, chain);
        let status = self.take_status().ok_or(Refused::NoStatus)?;
        gathered.ok_or(Refused::Malformed(status))?;
        let mut header = [0; HEADER_BYTES];
        self.take_front(memory, &mut header)
            .ok_or(Refused::Malformed(status))?;
        let [kind @ .., _, _, _, _, a, b, c, d, e, f, g, h] = header;
        let kind = u32::from_le_bytes(kind);
        let sector = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
        let operation = self
            .operation(memory, kind, sector)
            .ok_or(Refused::Malformed(status))?
            .ok_or(Refused::Unsupported(status))?;
        let data = match operation {
            Operation::Read(_) | Operation::Identify => &self.writable,
            _ => &self.readable,
        };
        Ok(Request {
            operation,
            status,
            data_bytes: total(data),
        })
    }

    /// Data from the driver.
    pub(super) fn readable_data(&self) -> &[Segment] {
        &self.readable
    }

    /// Space for data to the driver.
    pub(super) fn writable_data(&self) -> &[Segment] {
        &self.writable
    }

    /// Sorts a chain's buffers. `None` if the chain violates a rule; the writable buffers are kept
    /// even then, for the status.
    fn gather(&mut self, memory: &GuestMemory, chain: Chain) -> Option<()> {
        self.readable.clear();
        self.writable.clear();
        let mut sound = true;
        let mut cut_short = false;
        let mut region = Region::default();
        for descriptor in Walk::new(memory, chain) {
            cut_short = descriptor.has_next();
            let length = descriptor.length as usize;
            if length == 0 {
                continue;
            }
            let list = if descriptor.is_writable() {
                &mut self.writable
            } else {
                // Buffers that the device reads come first (§2.7.4.2).
                sound &= self.writable.is_empty();
                &mut self.readable
            };
            let segment = Segment {
                address: descriptor.address,
                length,
            };
            if !region.contains(memory, &segment) {
                sound = false;
            } else if list.len() <= SEGMENTS_MAX {
                list.push(segment);
            } else {
                // Too many buffers. The last one is kept, because it may hold the status.
                sound = false;
                list.pop();
                list.push(segment);
            }
        }
        if cut_short {
            // The rest can't be read or is a loop, so the place of the status byte is unknown.
            self.writable.clear();
            return None;
        }
        sound.then_some(())
    }

    /// Takes the last writable byte.
    fn take_status(&mut self) -> Option<GuestAddress> {
        let last = self.writable.last_mut()?;
        last.length -= 1;
        let status = GuestAddress(last.address.0 + last.length as u64);
        if last.length == 0 {
            self.writable.pop();
        }
        Some(status)
    }

    /// Takes bytes from the front of what the device reads.
    fn take_front(&mut self, memory: &GuestMemory, mut out: &mut [u8]) -> Option<()> {
        let mut used_up = 0;
        for segment in &mut self.readable {
            let count = segment.length.min(out.len());
            let (now, rest) = std::mem::take(&mut out).split_at_mut(count);
            memory.read_slice(now, segment.address).ok()?;
            out = rest;
            segment.address.0 += count as u64;
            segment.length -= count;
            used_up += usize::from(segment.length == 0);
            if out.is_empty() {
                break;
            }
        }
        self.readable.drain(..used_up);
        out.is_empty().then_some(())
    }

    /// Returns the operation: `None` if the request is malformed, `Some(None)` if its type is
    /// unknown.
    fn operation(
        &mut self,
        memory: &GuestMemory,
        kind: u32,
        sector: u64,
    ) -> Option<Option<Operation>> {
        let operation = match kind {
            VIRTIO_BLK_T_IN => {
                whole_sectors(&self.writable)?;
                Operation::Read(sector.checked_mul(SECTOR)?)
            }
            VIRTIO_BLK_T_OUT => {
                whole_sectors(&self.readable)?;
                Operation::Write(sector.checked_mul(SECTOR)?)
            }
            VIRTIO_BLK_T_FLUSH => Operation::Flush,
            VIRTIO_BLK_T_GET_ID => Operation::Identify,
            VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES => {
                return self.zero_operation(memory, kind == VIRTIO_BLK_T_DISCARD);
            }
            _ => return Some(None),
        };
        Some(Some(operation))
    }

    /// Reads the data of discard and write-zeroes: ranges of 16 bytes each.
    fn zero_operation(&mut self, memory: &GuestMemory, discard: bool) -> Option<Option<Operation>> {
        let bytes = usize::try_from(total(&self.readable)).ok()?;
        let count = bytes / RANGE_BYTES;
        if bytes % RANGE_BYTES != 0 || count == 0 || count > RANGES_MAX {
            return None;
        }
        let most = if discard {
            DISCARD_SECTORS_MAX
        } else {
            WRITE_ZEROES_SECTORS_MAX
        };
        let mut list = Ranges {
            count,
            ..Ranges::default()
        };
        for slot in &mut list.ranges[..count] {
            let mut range = [0; RANGE_BYTES];
            self.take_front(memory, &mut range)?;
            let [start @ .., c, d, e, f, g, h, i, j] = range;
            let start = u64::from_le_bytes(start).checked_mul(SECTOR)?;
            let sectors = u32::from_le_bytes([c, d, e, f]);
            let flags = u32::from_le_bytes([g, h, i, j]);
            if sectors > most {
                return None;
            }
            let unmap = flags == VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP;
            // Unknown flags, or "unmap" in a discard request (§5.2.6.2).
            if flags != 0 && (discard || !unmap) {
                return Some(None);
            }
            *slot = ZeroRange {
                bytes: start..start.checked_add(u64::from(sectors) * SECTOR)?,
                unmap,
            };
        }
        Some(Some(if discard {
            Operation::Discard(list)
        } else {
            Operation::WriteZeroes(list)
        }))
    }
}

fn total(segments: &[Segment]) -> u64 {
    segments.iter().map(|segment| segment.length as u64).sum()
}

fn whole_sectors(segments: &[Segment]) -> Option<()> {
    total(segments).is_multiple_of(SECTOR).then_some(())
}
