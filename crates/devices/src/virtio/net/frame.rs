//! Frames in guest memory.

use super::header::Lead;
use crate::GuestMemory;
use crate::virtio::queue::segment::{self, Region, Segment};
use crate::virtio::queue::vectored::Vectors;
use std::io;
use std::os::fd::BorrowedFd;

/// The place of a frame that is received: memory of the guest, and of the host for what does not
/// fit.
pub(super) struct Place<'a, 'm> {
    pub(super) memory: &'m GuestMemory,
    pub(super) region: &'a mut Region<'m>,
    pub(super) segments: &'a [Segment],
    pub(super) spill: &'a mut [u8],
    pub(super) vectors: &'a mut Vectors,
}

impl Place<'_, '_> {
    /// Reads a message; returns its length.
    pub(super) fn read_from(&mut self, source: BorrowedFd<'_>) -> io::Result<usize> {
        let memory = (self.memory, &mut *self.region);
        self.vectors
            .read_message(source, memory, self.segments, self.spill)
    }

    /// Copies bytes of the frame to their place, from its byte `offset` on.
    pub(super) fn store(&mut self, offset: usize, bytes: &[u8]) {
        let room = segment::length(self.segments);
        let (here, rest) = bytes.split_at(bytes.len().min(room.saturating_sub(offset)));
        segment::write(self.memory, self.segments, offset, here);
        let spilled = (offset + here.len()).saturating_sub(room);
        self.spill[spilled..][..rest.len()].copy_from_slice(rest);
    }
}

/// A frame that is sent.
pub(super) struct Frame<'a, 'm> {
    pub(super) memory: &'m GuestMemory,
    pub(super) region: &'a mut Region<'m>,
    /// Its first bytes as they were checked: the guest can change its memory meanwhile.
    pub(super) lead: &'a Lead,
    /// All of it, the lead included.
    pub(super) segments: &'a [Segment],
    pub(super) vectors: &'a mut Vectors,
}

impl Frame<'_, '_> {
    /// Bytes after the lead.
    pub(super) fn rest(&self) -> usize {
        segment::length(self.segments) - self.lead.len()
    }

    /// Copies the bytes after the lead, from the byte `offset` of them on.
    pub(super) fn copy_rest(&self, offset: usize) -> Vec<u8> {
        let mut bytes = vec![0; self.rest() - offset];
        let start = self.lead.len() + offset;
        segment::read(self.memory, self.segments, start, &mut bytes);
        bytes
    }

    /// Writes a message: `head`, and the bytes after the lead. Returns how many were written.
    pub(super) fn write_to(&mut self, target: BorrowedFd<'_>, head: &[u8]) -> io::Result<usize> {
        let rest = segment::part(self.segments, self.lead.len(), usize::MAX);
        let memory = (self.memory, &mut *self.region);
        self.vectors.write_message(target, memory, head, rest)
    }
}
