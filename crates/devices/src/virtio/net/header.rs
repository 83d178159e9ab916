//! The header before each frame (Virtio 1.3 §5.1.6).

use super::{ETHERNET, guard};
use std::ops::Deref;
use thiserror::Error;
use virtio_bindings::virtio_net::*;

/// Bytes of `struct virtio_net_hdr` (Virtio 1.3 §5.1.6) without hash fields.
pub const BYTES: usize = 12;

/// The virtio header, the Ethernet header and, if there is a guard, those of the packet. They are
/// checked, so they are copied: the guest can't change the copy.
pub(super) struct Lead {
    bytes: [u8; BYTES + guard::HEADERS_MAX],
    length: usize,
}

impl Lead {
    /// The first bytes of a message, which `load` copies; `None` if it is too short. With
    /// `packet`, the headers of the packet are among them.
    pub(super) fn new(packet: bool, load: impl FnOnce(&mut [u8]) -> usize) -> Option<Lead> {
        let mut bytes = [0; BYTES + guard::HEADERS_MAX];
        let wanted = match packet {
            true => bytes.len(),
            false => BYTES + ETHERNET,
        };
        let length = load(&mut bytes[..wanted]);
        (length >= BYTES + ETHERNET).then_some(Lead { bytes, length })
    }

    /// The virtio header.
    pub(super) fn header(&mut self) -> &mut [u8; BYTES] {
        self.bytes.first_chunk_mut().expect("a lead is longer")
    }

    /// The beginning of the frame.
    pub(super) fn frame(&self) -> &[u8] {
        &self[BYTES..]
    }
}

impl Deref for Lead {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

/// Offset of `num_buffers`.
pub(super) const NUM_BUFFERS: usize = 10;

/// A guest's header violates a rule; its frame is dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Refused {
    /// An offload that was not negotiated or does not exist.
    #[error("an offload (flags {flags:#x}, type {gso_type:#x}) that was not negotiated")]
    NotAgreed {
        /// The header's flags.
        flags: u8,
        /// The header's type.
        gso_type: u8,
    },
    /// A checksum field or header length points beyond the frame.
    #[error("offload fields point beyond the frame of {frame} bytes")]
    Beyond {
        /// Bytes of the frame.
        frame: u32,
    },
    /// Segments have no bytes, or no checksum.
    #[error("segments of no bytes, or without a checksum")]
    Segments,
}

/// The bytes of each datagram, if a checked header asks to send several UDP datagrams in one frame.
pub(super) fn datagram(header: &[u8]) -> Option<usize> {
    let is_datagrams = u32::from(header[1]) == VIRTIO_NET_HDR_GSO_UDP_L4;
    is_datagrams.then(|| u16::from_le_bytes([header[4], header[5]]).into())
}

fn has(features: u64, feature: u32) -> bool {
    features & (1 << feature) != 0
}

/// Checks the header of a frame of `frame` bytes, and returns the header for the host. `features`
/// are those that the driver has accepted. Fields without a meaning are zero.
///
/// # Errors
///
/// If it asks for an offload that was not negotiated or does not exist, if a field points beyond
/// the frame, or if the segments would have no bytes or no checksum.
pub fn check(header: &[u8; BYTES], frame: u32, features: u64) -> Result<[u8; BYTES], Refused> {
    let [flags, gso_type, ..] = *header;
    let word = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
    let (header_bytes, segment, start, offset) = (word(2), word(4), word(6), word(8));
    let mut checked = [0; BYTES];

    let needs_checksum = flags & VIRTIO_NET_HDR_F_NEEDS_CSUM as u8 != 0;
    let not_agreed = Refused::NotAgreed { flags, gso_type };
    if needs_checksum {
        if !has(features, VIRTIO_NET_F_CSUM) {
            return Err(not_agreed);
        }
        if u32::from(start) + u32::from(offset) + 2 > frame {
            return Err(Refused::Beyond { frame });
        }
        checked[0] = VIRTIO_NET_HDR_F_NEEDS_CSUM as u8;
        checked[6..10].copy_from_slice(&header[6..10]);
    }

    let ecn = gso_type & VIRTIO_NET_HDR_GSO_ECN as u8 != 0;
    let kind = u32::from(gso_type) & !VIRTIO_NET_HDR_GSO_ECN;
    let feature = match (kind, ecn) {
        (VIRTIO_NET_HDR_GSO_NONE, false) => return Ok(checked),
        (VIRTIO_NET_HDR_GSO_TCPV4, _) => VIRTIO_NET_F_HOST_TSO4,
        (VIRTIO_NET_HDR_GSO_TCPV6, _) => VIRTIO_NET_F_HOST_TSO6,
        (VIRTIO_NET_HDR_GSO_UDP, false) => VIRTIO_NET_F_HOST_UFO,
        (VIRTIO_NET_HDR_GSO_UDP_L4, false) => VIRTIO_NET_F_HOST_USO,
        _ => return Err(not_agreed),
    };
    if !has(features, feature) || ecn && !has(features, VIRTIO_NET_F_HOST_ECN) {
        return Err(not_agreed);
    }
    if !needs_checksum || segment == 0 {
        return Err(Refused::Segments);
    }
    if u32::from(header_bytes) > frame {
        return Err(Refused::Beyond { frame });
    }
    checked[1] = gso_type;
    checked[2..6].copy_from_slice(&header[2..6]);
    Ok(checked)
}
