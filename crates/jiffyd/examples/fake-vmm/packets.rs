//! Packets that the guest sends by its TAP.
#![allow(unsafe_code)] // The TAP is a descriptor with a number.

use crate::Vm;
use jiffy_wire::vmm::NetBackend;
use std::fs::File;
use std::io::Write;
use std::mem::ManuallyDrop;
use std::net::Ipv4Addr;
use std::os::fd::FromRawFd;

/// The virtio-net header: no offloads.
const HEADER: [u8; 12] = [0; 12];
/// Queries of a guest that does not flood.
const FEW: u16 = 4;

impl Vm {
    /// Sends the name server a few queries, each from another port, or queries without end.
    pub fn query(&self, endless: bool) {
        let net = self.config.nets.first().expect("a network");
        let NetBackend::Tap(numbers) = &net.backend else {
            panic!("no TAP");
        };
        // SAFETY: the node handed this descriptor over, and it stays open.
        let mut tap = ManuallyDrop::new(unsafe { File::from_raw_fd(numbers[0]) });
        let interface = self.guest.interfaces.first().expect("an interface");
        let own = interface.addresses[0]
            .split('/')
            .next()
            .expect("an address");
        let (own, gateway) = (address(own), &interface.neighbours[0]);
        for port in (1024..=u16::MAX).cycle().take(match endless {
            true => usize::MAX,
            false => usize::from(FEW),
        }) {
            let packet = query(own, address(&gateway.address), port);
            let frame = [&HEADER[..], &gateway.mac.0, &net.mac.0, &[8, 0], &packet].concat();
            let _ = tap.write(&frame);
        }
    }
}

fn address(text: &str) -> Ipv4Addr {
    text.parse().expect("an address")
}

/// A UDP packet to the name server's port that contains no query.
fn query(from: Ipv4Addr, to: Ipv4Addr, port: u16) -> Vec<u8> {
    let mut packet = vec![0x45, 0, 0, 32, 0, 0, 0, 0, 64, 17, 0, 0];
    packet.extend_from_slice(&from.octets());
    packet.extend_from_slice(&to.octets());
    let sum: u32 = packet
        .chunks(2)
        .map(|it| u32::from(it[0]) << 8 | u32::from(it[1]))
        .sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
    packet.extend_from_slice(&port.to_be_bytes());
    packet.extend_from_slice(&[0, 53, 0, 12, 0, 0, 1, 2, 3, 4]);
    packet
}
