//! Messages written one after the other into one buffer.

use super::{HEADER, NESTED, aligned, flags};
use netlink_packet_core::{NetlinkHeader, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::RouteNetlinkMessage;

/// Messages that are sent to the kernel as one datagram.
#[derive(Debug, Default)]
pub struct Batch {
    pub(super) bytes: Vec<u8>,
    /// The offset of each message.
    pub(super) starts: Vec<usize>,
}

impl Batch {
    /// An empty batch.
    pub fn new() -> Batch {
        Batch {
            bytes: Vec::with_capacity(2048),
            starts: Vec::with_capacity(16),
        }
    }

    /// Number of messages.
    pub fn len(&self) -> usize {
        self.starts.len()
    }

    /// Is there no message?
    pub fn is_empty(&self) -> bool {
        self.starts.is_empty()
    }

    /// A message of type `kind`, whose body `write` writes.
    pub fn message(&mut self, kind: u16, flags: u16, write: impl FnOnce(&mut Attributes)) {
        let start = self.start();
        self.bytes.resize(start + HEADER, 0);
        write(&mut Attributes {
            bytes: &mut self.bytes,
        });
        let length = (self.bytes.len() - start) as u32;
        let header = &mut self.bytes[start..start + HEADER];
        header[..4].copy_from_slice(&length.to_ne_bytes());
        header[4..6].copy_from_slice(&kind.to_ne_bytes());
        header[6..8].copy_from_slice(&(flags | flags::REQUEST).to_ne_bytes());
    }

    /// A message about links, addresses, routes or neighbours.
    pub fn route(&mut self, message: RouteNetlinkMessage, flags: u16) {
        let start = self.start();
        let mut header = NetlinkHeader::default();
        header.flags = flags | flags::REQUEST;
        let mut message = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(message));
        message.finalize();
        self.bytes.resize(start + message.buffer_len(), 0);
        message.serialize(&mut self.bytes[start..]);
    }

    fn start(&mut self) -> usize {
        let start = aligned(self.bytes.len());
        self.bytes.resize(start, 0);
        self.starts.push(start);
        start
    }

    /// Numbers the messages from `first` on, and requests an acknowledgement of the one at
    /// `answered`.
    pub(super) fn seal(&mut self, first: u32, answered: usize) {
        for (place, start) in self.starts.iter().enumerate() {
            let sequence = first.wrapping_add(place as u32);
            self.bytes[start + 8..start + 12].copy_from_slice(&sequence.to_ne_bytes());
            if place == answered {
                self.bytes[start + 6] |= flags::ACK as u8;
            }
        }
    }
}

/// Attributes: the payload of a message or of a nested attribute.
pub struct Attributes<'a> {
    bytes: &'a mut Vec<u8>,
}

impl Attributes<'_> {
    /// Bytes of a fixed structure, before any attribute.
    pub fn fixed(&mut self, bytes: &[u8]) -> &mut Self {
        self.bytes.extend_from_slice(bytes);
        self.pad();
        self
    }

    /// An attribute with raw bytes.
    pub fn bytes(&mut self, kind: u16, value: &[u8]) -> &mut Self {
        self.header(kind, value.len());
        self.bytes.extend_from_slice(value);
        self.pad();
        self
    }

    /// A string, which the kernel expects to be NUL-terminated.
    pub fn text(&mut self, kind: u16, value: &str) -> &mut Self {
        self.header(kind, value.len() + 1);
        self.bytes.extend_from_slice(value.as_bytes());
        self.bytes.push(0);
        self.pad();
        self
    }

    /// A 32-bit number in network byte order, as nfnetlink expects.
    pub fn number(&mut self, kind: u16, value: u32) -> &mut Self {
        self.bytes(kind, &value.to_be_bytes())
    }

    /// A 64-bit number in network byte order.
    pub fn long(&mut self, kind: u16, value: u64) -> &mut Self {
        self.bytes(kind, &value.to_be_bytes())
    }

    /// A nested attribute.
    pub fn nested(&mut self, kind: u16, write: impl FnOnce(&mut Attributes)) -> &mut Self {
        let start = self.bytes.len();
        self.header(kind | NESTED, 0);
        write(&mut Attributes { bytes: self.bytes });
        let length = (self.bytes.len() - start) as u16;
        self.bytes[start..start + 2].copy_from_slice(&length.to_ne_bytes());
        self
    }

    /// Bytes written so far into the whole batch.
    pub fn written(&self) -> usize {
        self.bytes.len()
    }

    fn header(&mut self, kind: u16, length: usize) {
        let length = (length + super::ATTRIBUTE_HEADER) as u16;
        self.bytes.extend_from_slice(&length.to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
    }

    fn pad(&mut self) {
        self.bytes.resize(aligned(self.bytes.len()), 0);
    }
}
