//! Reads of bytes that are missing in the disk's file.

use super::disk::{Disk, PIECE_BYTES, Scratch};
use super::residency::Fetched;
use crate::GuestMemory;
use crate::virtio::queue::segment::{Segment, take_front};
use std::io;
use std::ops::Range;
use vm_memory::{Bytes, GuestAddress};

/// A read that waits for requested bytes. It holds only numbers: guest memory is accessed when the
/// bytes have come.
#[derive(Debug)]
pub(super) struct WaitingRead {
    /// The id of the answer that it waits for.
    pub(super) ticket: u64,
    /// Address of the status byte.
    pub(super) status: GuestAddress,
    /// Bytes of the whole request.
    pub(super) length: u64,
    /// The requested bytes: the beginning of the rest.
    requested: Range<u64>,
    /// End of the read on the disk, exclusive.
    end: u64,
    /// Guest memory for the rest.
    left: Vec<Segment>,
}

/// The progress of a read.
pub(super) enum Step {
    /// All bytes are in guest memory.
    Done,
    /// It waits for an answer.
    Waits(WaitingRead),
}

impl Disk {
    /// Begins a read of which some bytes are missing in the file.
    pub(super) fn begin_waiting(
        &self,
        scratch: &mut Scratch,
        memory: &GuestMemory,
        segments: &[Segment],
        bytes: Range<u64>,
        status: GuestAddress,
    ) -> io::Result<Step> {
        let read = WaitingRead {
            ticket: 0,
            status,
            length: bytes.end - bytes.start,
            requested: bytes.start..bytes.start,
            end: bytes.end,
            left: segments.to_vec(),
        };
        self.continue_reading(scratch, memory, read)
    }

    /// Continues a read whose answer has come.
    pub(super) fn answered(
        &self,
        scratch: &mut Scratch,
        memory: &GuestMemory,
        mut read: WaitingRead,
        fetched: Fetched,
    ) -> io::Result<Step> {
        match fetched {
            Fetched::Present => self.read_from_file(scratch, memory, &mut read)?,
            Fetched::Bytes(bytes) => {
                let length = bytes.len() as u64;
                if length == 0 || length > read.requested.end - read.requested.start {
                    return Err(io::ErrorKind::InvalidData.into());
                }
                let mut rest = &bytes[..];
                for segment in take_front(&mut read.left, bytes.len()) {
                    let (now, later) = rest.split_at(segment.length);
                    memory
                        .write_slice(now, segment.address)
                        .map_err(io::Error::other)?;
                    rest = later;
                }
                read.requested.start += length;
            }
        }
        self.continue_reading(scratch, memory, read)
    }

    /// Reads present pieces up to one that is missing, and requests that one.
    fn continue_reading(
        &self,
        scratch: &mut Scratch,
        memory: &GuestMemory,
        mut read: WaitingRead,
    ) -> io::Result<Step> {
        let (residency, fetcher) = self.on_demand().ok_or(io::ErrorKind::Unsupported)?;
        loop {
            let start = read.requested.start;
            if start == read.end {
                return Ok(Step::Done);
            }
            scratch.check_stop()?;
            read.requested.end = read.end.min(start + PIECE_BYTES as u64);
            if !residency.is_present(&read.requested) {
                read.ticket = fetcher.ask(read.requested.clone());
                return Ok(Step::Waits(read));
            }
            self.read_from_file(scratch, memory, &mut read)?;
        }
    }

    /// Reads the requested bytes, all of which are present in the file.
    fn read_from_file(
        &self,
        scratch: &mut Scratch,
        memory: &GuestMemory,
        read: &mut WaitingRead,
    ) -> io::Result<()> {
        let length = (read.requested.end - read.requested.start) as usize;
        let segments = take_front(&mut read.left, length);
        self.read_present(scratch, memory, &segments, read.requested.start)?;
        read.requested.start = read.requested.end;
        Ok(())
    }
}
