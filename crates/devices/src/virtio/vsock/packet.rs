//! Packets: the header, and the buffers of one descriptor chain.
//!
//! The driver may split a packet into descriptors in any way (Virtio 1.3 §2.7.4): Linux sends
//! header and payload in one descriptor, in two, or, for zero-copy sends, in one per page. Nothing
//! here depends on it.

use crate::GuestMemory;
use crate::virtio::queue::chain::{Chain, Walk};
use crate::virtio::queue::segment::{self, Region, Segment};
use crate::virtio::queue::vectored::Vectors;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use thiserror::Error;
use vm_memory::Permissions;

/// Bytes of a header.
pub const HEADER_LEN: usize = 44;

/// Largest payload of a packet in either direction, bytes. Linux splits its packets at this size.
pub const MAX_PAYLOAD: u32 = 64 * 1024;

/// Most descriptors of a chain: all of the largest queue.
const CHAIN_LIMIT: usize = 128;

/// The host's context id (Virtio 1.3 §5.10.4).
pub const HOST_CID: u64 = 2;

/// Socket type: stream, the only one offered (Virtio 1.3 §5.10.6).
pub const TYPE_STREAM: u16 = 1;

/// SHUTDOWN: the sender receives no more.
pub const SHUTDOWN_RECEIVE: u32 = 1;
/// SHUTDOWN: the sender sends no more.
pub const SHUTDOWN_SEND: u32 = 2;

/// The operation of a packet (Virtio 1.3 §5.10.6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum Op {
    /// Requests a connection.
    Request = 1,
    /// Accepts a connection.
    Response = 2,
    /// Refuses or ends a connection.
    Rst = 3,
    /// Ends one direction of a connection, or both.
    Shutdown = 4,
    /// Carries bytes.
    Rw = 5,
    /// Reports the sender's credit.
    CreditUpdate = 6,
    /// Requests the receiver's credit.
    CreditRequest = 7,
}

impl Op {
    /// The operation with this number, if there is one.
    pub fn from_number(number: u16) -> Option<Op> {
        Some(match number {
            1 => Op::Request,
            2 => Op::Response,
            3 => Op::Rst,
            4 => Op::Shutdown,
            5 => Op::Rw,
            6 => Op::CreditUpdate,
            7 => Op::CreditRequest,
            _ => return None,
        })
    }
}

/// `struct virtio_vsock_hdr` (Virtio 1.3 §5.10.6), little-endian and packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Header {
    /// The sender's context id.
    pub src_cid: u64,
    /// The receiver's context id.
    pub dst_cid: u64,
    /// The sender's port.
    pub src_port: u32,
    /// The receiver's port.
    pub dst_port: u32,
    /// Bytes of payload that follow.
    pub len: u32,
    /// Socket type.
    pub kind: u16,
    /// Operation: an [`Op`], or anything from a hostile guest.
    pub op: u16,
    /// Flags of a SHUTDOWN.
    pub flags: u32,
    /// The sender's receive buffer, in bytes.
    pub buf_alloc: u32,
    /// Bytes that the sender has taken out of that buffer so far, wrapping.
    pub fwd_cnt: u32,
}

impl Header {
    /// Decodes a header.
    pub fn from_bytes(bytes: &[u8; HEADER_LEN]) -> Header {
        let mut fields = Fields(bytes);
        Header {
            src_cid: u64::from_le_bytes(fields.next()),
            dst_cid: u64::from_le_bytes(fields.next()),
            src_port: u32::from_le_bytes(fields.next()),
            dst_port: u32::from_le_bytes(fields.next()),
            len: u32::from_le_bytes(fields.next()),
            kind: u16::from_le_bytes(fields.next()),
            op: u16::from_le_bytes(fields.next()),
            flags: u32::from_le_bytes(fields.next()),
            buf_alloc: u32::from_le_bytes(fields.next()),
            fwd_cnt: u32::from_le_bytes(fields.next()),
        }
    }

    /// The encoded header.
    pub fn to_bytes(self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        bytes[0..8].copy_from_slice(&self.src_cid.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.dst_cid.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.src_port.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.dst_port.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.len.to_le_bytes());
        bytes[28..30].copy_from_slice(&self.kind.to_le_bytes());
        bytes[30..32].copy_from_slice(&self.op.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.flags.to_le_bytes());
        bytes[36..40].copy_from_slice(&self.buf_alloc.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.fwd_cnt.to_le_bytes());
        bytes
    }
}

/// Splits a header into its fields, in order.
struct Fields<'b>(&'b [u8]);

impl Fields<'_> {
    fn next<const N: usize>(&mut self) -> [u8; N] {
        let (field, rest) = self.0.split_first_chunk().expect("fields fill the header");
        self.0 = rest;
        *field
    }
}

/// Why a packet of the guest, or a buffer for one, can't be used.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum Malformed {
    /// A device-readable chain has a writable descriptor, or the reverse.
    #[error("a descriptor has the wrong direction")]
    Direction,
    /// A descriptor is outside RAM.
    #[error("a descriptor points outside of guest memory")]
    OutsideMemory,
    /// The chain has more descriptors than the queue. Only an indirect table, which is not offered,
    /// could have so many.
    #[error("the chain has more than {0} descriptors")]
    TooMany(usize),
    /// The chain is shorter than a header.
    #[error("the chain holds {0} bytes, less than a header")]
    TooShort(usize),
    /// The payload is longer than [`MAX_PAYLOAD`].
    #[error("a payload of {0} bytes is over the limit of {MAX_PAYLOAD}")]
    TooLong(u32),
    /// The header announces more payload than the chain has.
    #[error("the header promises {promised} bytes of payload, the chain holds {held}")]
    Truncated {
        /// The header's `len`.
        promised: u32,
        /// Bytes after the header.
        held: usize,
    },
    /// The source is not this guest.
    #[error("the source context id {0} is not the guest's")]
    ForeignSource(u64),
}

/// The memory of one descriptor chain, in order. Reused from chain to chain.
pub struct Buffers<'m> {
    memory: &'m GuestMemory,
    segments: Vec<Segment>,
    len: usize,
}

/// The result of reading from a host socket.
#[derive(Debug, PartialEq, Eq)]
pub enum Received {
    /// So many bytes, at least one.
    Bytes(usize),
    /// There are no bytes now.
    Empty,
    /// There will be no more bytes.
    End,
}

impl<'m> Buffers<'m> {
    /// No buffers yet.
    pub fn new(memory: &'m GuestMemory) -> Buffers<'m> {
        Buffers {
            memory,
            segments: Vec::new(),
            len: 0,
        }
    }

    /// Takes the buffers of `chain`, all of whose descriptors must be device-readable
    /// ([`Permissions::Read`]) or device-writable ([`Permissions::Write`]).
    ///
    /// # Errors
    ///
    /// If a descriptor has the wrong direction or is outside of guest memory, or if there are too
    /// many.
    pub fn load(&mut self, chain: Chain, access: Permissions) -> Result<(), Malformed> {
        self.segments.clear();
        self.len = 0;
        let mut region = Region::default();
        for (index, descriptor) in Walk::new(self.memory, chain).enumerate() {
            if index == CHAIN_LIMIT {
                return Err(Malformed::TooMany(CHAIN_LIMIT));
            }
            if descriptor.is_writable() != (access == Permissions::Write) {
                return Err(Malformed::Direction);
            }
            let segment = Segment {
                address: descriptor.address,
                length: descriptor.length as usize,
            };
            if segment.length == 0 {
                continue;
            }
            if !region.contains(self.memory, &segment) {
                return Err(Malformed::OutsideMemory);
            }
            self.segments.push(segment);
            self.len += segment.length;
        }
        Ok(())
    }

    /// Bytes of all buffers.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Fills `target` from `offset`; the caller has checked the length.
    pub fn copy_to(&self, offset: usize, target: &mut [u8]) {
        segment::read(self.memory, &self.segments, offset, target);
    }

    /// Writes `source` at `offset`; the caller has checked the length.
    pub fn copy_from(&self, offset: usize, source: &[u8]) {
        segment::write(self.memory, &self.segments, offset, source);
    }

    /// Sends `length` bytes from `offset` on to a non-blocking socket. Returns how many were sent:
    /// fewer if the socket is full.
    ///
    /// # Errors
    ///
    /// If send(2) fails for another reason, such as with `EPIPE` if the program is gone.
    pub fn send(&self, stream: &UnixStream, offset: usize, length: usize) -> io::Result<usize> {
        let part = segment::part(&self.segments, offset, length);
        Vectors::default().send(stream.as_fd(), self.memory, part)
    }

    /// Reads up to `length` bytes from a non-blocking socket to `offset`.
    ///
    /// # Errors
    ///
    /// If read(2) fails. That there are no bytes is no error.
    pub fn receive(
        &self,
        stream: &UnixStream,
        offset: usize,
        length: usize,
    ) -> io::Result<Received> {
        let part = segment::part(&self.segments, offset, length);
        match Vectors::default().receive(stream.as_fd(), self.memory, part) {
            Ok(0) => Ok(Received::End),
            Ok(count) => Ok(Received::Bytes(count)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Received::Empty),
            Err(error) => Err(error),
        }
    }
}

/// Reads and checks the header of a packet from the guest; its payload is `len` bytes of `buffers`
/// from [`HEADER_LEN`] on. The caller checks destination, type and operation, and answers wrong
/// ones with RST. The source may be any of `guest_cids`.
///
/// # Errors
///
/// If the chain is shorter than a header or than the payload that the header announces, if the
/// payload is longer than [`MAX_PAYLOAD`], or if the source is none of `guest_cids`.
pub fn parse(buffers: &Buffers<'_>, guest_cids: &[u64]) -> Result<Header, Malformed> {
    let Some(held) = buffers.len().checked_sub(HEADER_LEN) else {
        return Err(Malformed::TooShort(buffers.len()));
    };
    let mut bytes = [0; HEADER_LEN];
    buffers.copy_to(0, &mut bytes);
    let header = Header::from_bytes(&bytes);
    if header.len > MAX_PAYLOAD {
        return Err(Malformed::TooLong(header.len));
    }
    if header.len as usize > held {
        return Err(Malformed::Truncated {
            promised: header.len,
            held,
        });
    }
    if !guest_cids.contains(&header.src_cid) {
        return Err(Malformed::ForeignSource(header.src_cid));
    }
    Ok(header)
}
