//! Reads requests from guest memory and checks what the device relies on (Virtio 1.3 §5.11.6,
//! linux/fuse.h).
//!
//! A request is a chain of buffers: first those that the device reads (`struct fuse_in_header` and
//! the arguments), then those that it writes (`struct fuse_out_header` and the results).

use crate::GuestMemory;
use crate::virtio::queue::chain::{Chain, Walk};
use crate::virtio::queue::segment::{self, Region, Segment};
use thiserror::Error;

/// Bytes of `struct fuse_in_header`: length, opcode, id, node, uid, gid, pid, extensions.
pub(super) const IN_HEADER: usize = 40;
/// Bytes of `struct fuse_out_header`: length, error, id.
pub(super) const OUT_HEADER: usize = 16;
/// Where both headers have the id of the request (`unique`).
const ID: std::ops::Range<usize> = 8..16;

/// Most buffers in each direction. Linux uses two for headers, a few for arguments, and one for each
/// page of data.
const SEGMENTS_MAX: usize = 256;

const FORGET: u32 = 2;
const INTERRUPT: u32 = 36;
const BATCH_FORGET: u32 = 42;

/// How a request is handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// The server answers it.
    Answered,
    /// The server gets it, and does not answer.
    Unanswered,
    /// The server does not get it: an INTERRUPT names another request by the guest's id, which the
    /// server does not know. A file server may ignore interrupts.
    Ignored,
}

/// A request.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) kind: Kind,
    /// The guest's id of it.
    pub(super) id: u64,
    /// Where its answer goes.
    pub(super) answer: Vec<Segment>,
}

/// Why a chain is not a request.
#[derive(Debug, Error, PartialEq, Eq)]
pub(super) enum Refused {
    #[error("a chain of descriptors that is broken, or has buffers outside of guest memory")]
    Chain,
    #[error("a message of {actual} bytes whose header says {header}")]
    Length { actual: usize, header: usize },
    #[error("a message of {0} bytes, or with room for an answer of more than that")]
    TooLong(usize),
    #[error("a request without room for an answer")]
    NoRoom,
}

/// Reads the request of a chain into `message`, which has room for the longest one. Returns it and
/// the length of its message.
pub(super) fn read(
    memory: &GuestMemory,
    chain: Chain,
    message: &mut [u8],
) -> Result<(Request, usize), Refused> {
    let (readable, answer) = gather(memory, chain)?;
    let (actual, longest) = (segment::length(&readable), message.len());
    if actual > longest || segment::length(&answer) > longest {
        return Err(Refused::TooLong(longest));
    }
    let message = &mut message[..actual];
    segment::read(memory, &readable, 0, message);
    let header = match message.first_chunk::<IN_HEADER>() {
        Some(header) => header,
        None => {
            return Err(Refused::Length {
                actual,
                header: IN_HEADER,
            });
        }
    };
    let [a, b, c, d, e, f, g, h, ..] = *header;
    let stated = u32::from_le_bytes([a, b, c, d]) as usize;
    if stated != actual {
        return Err(Refused::Length {
            actual,
            header: stated,
        });
    }
    let kind = match u32::from_le_bytes([e, f, g, h]) {
        FORGET | BATCH_FORGET => Kind::Unanswered,
        INTERRUPT => Kind::Ignored,
        _ if segment::length(&answer) < OUT_HEADER => return Err(Refused::NoRoom),
        _ => Kind::Answered,
    };
    let id = id_of(message);
    Ok((Request { kind, id, answer }, actual))
}

/// The id in the header of a message.
pub(super) fn id_of(message: &[u8]) -> u64 {
    let bytes = message.get(ID).and_then(|bytes| bytes.try_into().ok());
    u64::from_le_bytes(bytes.unwrap_or_default())
}

/// Replaces the id in the header of a message.
pub(super) fn set_id(message: &mut [u8], id: u64) {
    if let Some(bytes) = message.get_mut(ID) {
        bytes.copy_from_slice(&id.to_le_bytes());
    }
}

/// An answer without results: an error number, positive.
pub(super) fn error_answer(id: u64, errno: i32) -> [u8; OUT_HEADER] {
    let mut answer = [0; OUT_HEADER];
    answer[..4].copy_from_slice(&(OUT_HEADER as u32).to_le_bytes());
    answer[4..8].copy_from_slice(&(-errno).to_le_bytes());
    set_id(&mut answer, id);
    answer
}

/// Writes an answer to the guest, if there is room for it; returns the bytes written.
pub(super) fn write_answer(memory: &GuestMemory, room: &[Segment], answer: &[u8]) -> Option<u32> {
    if answer.len() > segment::length(room) {
        return None;
    }
    segment::write(memory, room, 0, answer);
    u32::try_from(answer.len()).ok()
}

/// Sorts a chain's buffers into those that the device reads and those that it writes.
fn gather(memory: &GuestMemory, chain: Chain) -> Result<(Vec<Segment>, Vec<Segment>), Refused> {
    let (mut readable, mut writable) = (Vec::new(), Vec::new());
    let mut region = Region::default();
    let mut is_whole = false;
    for descriptor in Walk::new(memory, chain) {
        is_whole = !descriptor.has_next();
        let segment = Segment {
            address: descriptor.address,
            length: descriptor.length as usize,
        };
        if segment.length == 0 {
            continue;
        }
        // Buffers that the device reads come first (§2.7.4.2).
        let list = match descriptor.is_writable() {
            true => &mut writable,
            false if writable.is_empty() => &mut readable,
            false => return Err(Refused::Chain),
        };
        if list.len() == SEGMENTS_MAX || !region.contains(memory, &segment) {
            return Err(Refused::Chain);
        }
        list.push(segment);
    }
    match is_whole {
        true => Ok((readable, writable)),
        false => Err(Refused::Chain),
    }
}
