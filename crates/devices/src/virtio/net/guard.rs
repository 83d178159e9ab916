//! Which packets a guest may send, where the host has no rules for it.
//!
//! passt connects to whatever address a packet names, also to the host's own. A guard lets only
//! ARP and IPv4 pass, and drops IPv4 packets to closed addresses. Answers to TCP connections from
//! closed addresses are known by their flags and the guest's port; of UDP, the last senders are
//! remembered.

use super::ETHERNET;
use jiffy_sys::mutex::lock;
use std::collections::VecDeque;
use std::net::Ipv4Addr;
use std::sync::Mutex;

/// Longest headers that are checked: Ethernet, IPv4 with options, TCP without.
pub(super) const HEADERS_MAX: usize = ETHERNET + 60 + 20;

/// Senders of datagrams that the guest may answer.
const SENDERS: usize = 256;
const NAMES: u16 = 53;
pub(super) const TYPE_IPV4: [u8; 2] = [0x08, 0x00];
const TYPE_ARP: [u8; 2] = [0x08, 0x06];
const TCP: u8 = 6;
pub(super) const UDP: u8 = 17;
/// The host itself, by any address of it that all hosts have; groups, broadcast and reserved ones.
const NEVER: [Range; 3] = [
    Range::new(Ipv4Addr::UNSPECIFIED, 8),
    Range::new(Ipv4Addr::LOCALHOST, 8),
    Range::new(Ipv4Addr::new(224, 0, 0, 0), 3),
];

/// Addresses with the same first bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    address: u32,
    mask: u32,
}

impl Range {
    /// The addresses that have their first `prefix` bits, at most 32, in common with `address`.
    pub const fn new(address: Ipv4Addr, prefix: u8) -> Range {
        let prefix = if prefix < 32 { prefix } else { 32 };
        let mask = (!0u64 << (32 - prefix)) as u32;
        Range {
            address: address.to_bits() & mask,
            mask,
        }
    }

    fn contains(self, address: u32) -> bool {
        address & self.mask == self.address
    }
}

/// Which packets may be sent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Guard {
    /// Destinations that are closed, besides those that always are.
    pub closed: Vec<Range>,
    /// Closed destinations that are open at port 53.
    pub name_servers: Vec<Ipv4Addr>,
    /// TCP ports of the guest, each the first and the last of a range, from which it may answer
    /// connections of closed addresses.
    pub tcp: Vec<(u16, u16)>,
}

/// A guard in force.
#[derive(Debug)]
pub(super) struct Gate {
    guard: Guard,
    /// The last closed addresses and ports that sent a datagram, and the guest's port; the latest
    /// is last.
    senders: Mutex<VecDeque<(u32, u16, u16)>>,
}

/// What the guard reads of an IPv4 packet.
struct Packet<'a> {
    source: u32,
    destination: u32,
    protocol: u8,
    /// What follows its header, unless it is a fragment.
    payload: Option<&'a [u8]>,
}

impl Packet<'_> {
    fn read(packet: &[u8]) -> Option<Packet<'_>> {
        let (header, _) = packet.split_first_chunk::<20>()?;
        let header_bytes = usize::from(header[0] & 0xf) * 4;
        if header[0] >> 4 != 4 || header_bytes < header.len() {
            return None;
        }
        let word = |at: usize| u32::from_be_bytes([0, 1, 2, 3].map(|byte| header[at + byte]));
        let is_whole = u16::from_be_bytes([header[6], header[7]]) & 0x3fff == 0;
        Some(Packet {
            source: word(12),
            destination: word(16),
            protocol: header[9],
            payload: packet.get(header_bytes..).filter(|_| is_whole),
        })
    }

    /// Source and destination of TCP and UDP.
    fn ports(&self) -> Option<(u16, u16)> {
        let [a, b, c, d] = *self.payload?.first_chunk()?;
        Some((u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d])))
    }
}

impl Gate {
    pub(super) fn new(guard: Guard) -> Gate {
        Gate {
            guard,
            senders: Mutex::default(),
        }
    }

    fn is_closed(&self, address: u32) -> bool {
        let mut closed = self.guard.closed.iter();
        closed.any(|range| range.contains(address))
    }

    /// A frame for the guest comes in, whose sender it may answer.
    pub(super) fn note(&self, frame: &[u8]) {
        let Some((ethernet, packet)) = frame.split_first_chunk::<ETHERNET>() else {
            return;
        };
        let packet = Packet::read(packet).filter(|_| ethernet[12..] == TYPE_IPV4);
        if let Some(packet) = packet.filter(|it| it.protocol == UDP && self.is_closed(it.source))
            && let Some((from, to)) = packet.ports()
        {
            let sender = (packet.source, from, to);
            let mut senders = lock(&self.senders);
            if senders.back() != Some(&sender) {
                senders.retain(|other| *other != sender);
                if senders.len() == SENDERS {
                    senders.pop_front();
                }
                senders.push_back(sender);
            }
        }
    }

    /// Whether a frame that begins with `head`, [`HEADERS_MAX`] bytes or all of it, may be sent.
    pub(super) fn passes(&self, head: &[u8]) -> bool {
        let Some((ethernet, packet)) = head.split_first_chunk::<ETHERNET>() else {
            return false;
        };
        match [ethernet[12], ethernet[13]] {
            TYPE_ARP => true,
            TYPE_IPV4 => self.passes_packet(packet),
            _ => false,
        }
    }

    fn passes_packet(&self, packet: &[u8]) -> bool {
        let Some(packet) = Packet::read(packet) else {
            return false;
        };
        let destination = packet.destination;
        if NEVER.iter().any(|range| range.contains(destination)) {
            return false;
        }
        if !self.is_closed(destination) {
            return true;
        }
        let Some((from, to)) = packet.ports() else {
            return false;
        };
        let asks = to == NAMES && self.guard.name_servers.contains(&destination.into());
        match packet.protocol {
            TCP => asks || self.answers_tcp(from, packet.payload),
            UDP => asks || lock(&self.senders).contains(&(destination, to, from)),
            _ => false,
        }
    }

    /// Whether a segment of TCP belongs to a connection to a port from which the guest may answer.
    fn answers_tcp(&self, from: u16, segment: Option<&[u8]>) -> bool {
        const FLAGS: usize = 13;
        const SYN: u8 = 2;
        const ACK: u8 = 16;
        let flags = segment.and_then(|segment| segment.get(FLAGS));
        let mut ports = self.guard.tcp.iter();
        ports.any(|&(first, last)| (first..=last).contains(&from))
            && flags.is_some_and(|flags| flags & (SYN | ACK) != SYN)
    }
}
