//! Reads of which some bytes are not in the disk's file yet.

use super::disk::{Disk, PIECE_BYTES, Scratch};
use super::residency::Fetched;
use crate::GuestMemory;
use crate::virtio::queue::segment::{Segment, take_front};
use std::io;
use std::ops::Range;
use vm_memory::{Bytes, GuestAddress};

/// A read that waits for bytes which were asked for. It holds nothing but numbers: the
/// guest's memory is touched when bytes come.
#[derive(Debug)]
pub(super) struct WaitingRead {
    /// The number of the answer it waits for.
    pub(super) ticket: u64,
    /// Where the status byte goes.
    pub(super) status: GuestAddress,
    /// Bytes of the whole request.
    pub(super) length: u64,
    /// What was asked for: the beginning of what is left.
    asked: Range<u64>,
    /// The byte of the disk behind the last that is wanted.
    end: u64,
    /// Guest memory for what is left.
    left: Vec<Segment>,
}

/// How far a read has come.
pub(super) enum Step {
    /// All bytes are in guest memory.
    Done,
    /// It waits for an answer.
    Waits(WaitingRead),
}

impl Disk {
    /// Begins a read, of whose bytes some are not in the file.
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
            asked: bytes.start..bytes.start,
            end: bytes.end,
            left: segments.to_vec(),
        };
        self.go_on_reading(scratch, memory, read)
    }

    /// Goes on with a read whose answer has come.
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
                if length == 0 || length > read.asked.end - read.asked.start {
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
                read.asked.start += length;
            }
        }
        self.go_on_reading(scratch, memory, read)
    }

    /// Reads what is in the file, a piece at a time, up to a piece that is not: that is
    /// asked for.
    fn go_on_reading(
        &self,
        scratch: &mut Scratch,
        memory: &GuestMemory,
        mut read: WaitingRead,
    ) -> io::Result<Step> {
        let (residency, fetcher) = self.on_demand().ok_or(io::ErrorKind::Unsupported)?;
        loop {
            let start = read.asked.start;
            if start == read.end {
                return Ok(Step::Done);
            }
            scratch.go_on()?;
            read.asked.end = read.end.min(start + PIECE_BYTES as u64);
            if !residency.is_present(&read.asked) {
                read.ticket = fetcher.ask(read.asked.clone());
                return Ok(Step::Waits(read));
            }
            self.read_from_file(scratch, memory, &mut read)?;
        }
    }

    /// Reads the bytes that were asked for, all of which are in the file.
    fn read_from_file(
        &self,
        scratch: &mut Scratch,
        memory: &GuestMemory,
        read: &mut WaitingRead,
    ) -> io::Result<()> {
        let length = (read.asked.end - read.asked.start) as usize;
        let segments = take_front(&mut read.left, length);
        self.read_present(scratch, memory, &segments, read.asked.start)?;
        read.asked.start = read.asked.end;
        Ok(())
    }
}
