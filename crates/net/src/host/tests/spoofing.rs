//! Packets of a VM with addresses that are not its own.

use super::world::*;
use super::{on_host, open, spec, vm};
use jiffy_wire::mac::Mac;
use rustix::io::write;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

/// The virtio-net header before each packet: no offloads.
const HEADER: usize = 12;

fn ethernet(from: Mac, kind: u16, body: &[u8]) -> Vec<u8> {
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

/// UDP to port 9, without a checksum.
fn udp4(from: Ipv4Addr, to: Ipv4Addr) -> Vec<u8> {
    let mut packet = vec![0x45, 0, 0, 32, 0, 0, 0, 0, 64, 17, 0, 0];
    packet.extend_from_slice(&from.octets());
    packet.extend_from_slice(&to.octets());
    let sum = checksum(&packet);
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
    packet.extend_from_slice(&[0, 9, 0, 9, 0, 12, 0, 0, 1, 2, 3, 4]);
    packet
}

fn icmp6(from: Ipv6Addr, to: Ipv6Addr, kind: u8) -> Vec<u8> {
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

#[test]
fn spoofed_packets_of_a_vm_are_dropped_and_counted() {
    let world = World::new();
    let (mut host, report) = open(&world);
    let (a, b) = on_host(&world, || {
        let (a, b) = (spec(&mut host, 1), spec(&mut host, 2));
        (
            host.attach(&a).expect("attached"),
            host.attach(&b).expect("attached"),
        )
    });
    let (mine, theirs) = (a.addresses, b.addresses);
    let far: Ipv4Addr = PUBLIC.parse().expect("an address");
    let counted = |host: &mut crate::host::Host| {
        let counted = on_host(&world, || host.counters(vm(1)).expect("counters"));
        counted.1.spoofed
    };
    let tap = &a.tap.queues[0];
    let own = udp4(mine.v4, far);
    write(tap, &ethernet(mine.mac, 0x0800, &own)).expect("sent");
    assert_eq!(counted(&mut host), 0);

    let host_mac = crate::identity::GATEWAY_MAC;
    let mut spoofed = vec![
        (
            "another's address",
            ethernet(mine.mac, 0x0800, &udp4(theirs.v4, far)),
        ),
        (
            "the gateway's address",
            ethernet(mine.mac, 0x0800, &udp4(mine.gateway, far)),
        ),
        (
            "a public address",
            ethernet(mine.mac, 0x0800, &udp4(far, far)),
        ),
        ("another's MAC", ethernet(theirs.mac, 0x0800, &own)),
        ("the host's MAC", ethernet(host_mac, 0x0800, &own)),
        (
            "to the host's loopback",
            ethernet(mine.mac, 0x0800, &udp4(mine.v4, Ipv4Addr::LOCALHOST)),
        ),
    ];
    if let Some(v6) = mine.v6 {
        let local: Ipv6Addr = "fe80::1".parse().expect("an address");
        let all: Ipv6Addr = "ff02::1".parse().expect("an address");
        let public: Ipv6Addr = PUBLIC6.parse().expect("an address");
        spoofed.extend([
            (
                "a router advertisement",
                ethernet(mine.mac, 0x86dd, &icmp6(local, all, 134)),
            ),
            (
                "one of its own",
                ethernet(mine.mac, 0x86dd, &icmp6(v6, all, 134)),
            ),
            (
                "a redirect",
                ethernet(mine.mac, 0x86dd, &icmp6(local, v6, 137)),
            ),
            (
                "another's IPv6",
                ethernet(mine.mac, 0x86dd, &icmp6(public, public, 128)),
            ),
        ]);
    } else {
        assert!(report.no_ipv6.is_some());
    }
    for (place, (what, frame)) in spoofed.iter().enumerate() {
        write(tap, frame).expect("sent");
        let end = Instant::now() + Duration::from_secs(5);
        while counted(&mut host) != place as u64 + 1 {
            assert!(Instant::now() < end, "{what} was not counted");
        }
    }
    // ARP has no effect: addresses are bound to links by permanent entries, and nobody answers.
    let mut arp = vec![0, 1, 8, 0, 6, 4, 0, 1];
    arp.extend_from_slice(&mine.mac.0);
    arp.extend_from_slice(&theirs.v4.octets());
    arp.extend_from_slice(&[0; 6]);
    arp.extend_from_slice(&mine.gateway.octets());
    write(tap, &ethernet(mine.mac, 0x0806, &arp)).expect("sent");
    let neighbours = on_host(&world, || {
        let mut channel = crate::netlink::Channel::route().expect("a socket");
        crate::links::found::neighbours(&mut channel, a.tap.index).expect("neighbours")
    });
    let expected = [Some(mine.v4.into()), mine.v6.map(Into::into)];
    let expected: Vec<std::net::IpAddr> = expected.into_iter().flatten().collect();
    assert_eq!(neighbours, expected);
}
