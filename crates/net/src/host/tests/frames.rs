//! Frames of a guest, as its TAP takes them.

use jiffy_wire::mac::Mac;
use std::net::{Ipv4Addr, Ipv6Addr};

/// The virtio-net header before each packet: no offloads.
const HEADER: usize = 12;

pub fn ethernet(from: Mac, kind: u16, body: &[u8]) -> Vec<u8> {
    let mut frame = vec![0; HEADER];
    frame.extend_from_slice(&crate::identity::GATEWAY_MAC.0);
    frame.extend_from_slice(&from.0);
    frame.extend_from_slice(&kind.to_be_bytes());
    frame.extend_from_slice(body);
    frame
}

fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes
        .chunks(2)
        .map(|it| u32::from(it[0]) << 8 | u32::from(*it.get(1).unwrap_or(&0)));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

fn ipv4(protocol: u8, from: Ipv4Addr, to: Ipv4Addr, body: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x45, 0];
    packet.extend_from_slice(&(20 + body.len() as u16).to_be_bytes());
    packet.extend_from_slice(&[0, 0, 0, 0, 64, protocol, 0, 0]);
    packet.extend_from_slice(&from.octets());
    packet.extend_from_slice(&to.octets());
    let sum = checksum(&packet);
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
    packet.extend_from_slice(body);
    packet
}

/// UDP without a checksum.
pub fn udp4(from: (Ipv4Addr, u16), to: (Ipv4Addr, u16)) -> Vec<u8> {
    let [a, b] = from.1.to_be_bytes();
    let [c, d] = to.1.to_be_bytes();
    ipv4(17, from.0, to.0, &[a, b, c, d, 0, 12, 0, 0, 1, 2, 3, 4])
}

/// The first packet of a TCP connection.
pub fn syn(from: (Ipv4Addr, u16), to: (Ipv4Addr, u16)) -> Vec<u8> {
    let [a, b] = from.1.to_be_bytes();
    let [c, d] = to.1.to_be_bytes();
    let mut body = vec![
        a, b, c, d, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 2, 0xff, 0xff, 0, 0, 0, 0,
    ];
    let mut pseudo = from.0.octets().to_vec();
    pseudo.extend_from_slice(&to.0.octets());
    pseudo.extend_from_slice(&[0, 6, 0, body.len() as u8]);
    pseudo.extend_from_slice(&body);
    let sum = checksum(&pseudo);
    body[16..18].copy_from_slice(&sum.to_be_bytes());
    ipv4(6, from.0, to.0, &body)
}

/// An ICMP echo request.
pub fn echo(from: Ipv4Addr, id: u16, to: Ipv4Addr) -> Vec<u8> {
    let [a, b] = id.to_be_bytes();
    let mut body = vec![8, 0, 0, 0, a, b, 0, 1];
    let sum = checksum(&body);
    body[2..4].copy_from_slice(&sum.to_be_bytes());
    ipv4(1, from, to, &body)
}

pub fn icmp6(from: Ipv6Addr, to: Ipv6Addr, kind: u8) -> Vec<u8> {
    let mut body = vec![kind, 0, 0, 0, 64, 0, 255, 255, 0, 0, 0, 0, 0, 0, 0, 0];
    let mut pseudo = from.octets().to_vec();
    pseudo.extend_from_slice(&to.octets());
    pseudo.extend_from_slice(&[0, 0, 0, body.len() as u8, 0, 0, 0, 58]);
    pseudo.extend_from_slice(&body);
    let sum = checksum(&pseudo);
    body[2..4].copy_from_slice(&sum.to_be_bytes());
    let mut packet = vec![0x60, 0, 0, 0, 0, body.len() as u8, 58, 255];
    packet.extend_from_slice(&from.octets());
    packet.extend_from_slice(&to.octets());
    packet.extend_from_slice(&body);
    packet
}
