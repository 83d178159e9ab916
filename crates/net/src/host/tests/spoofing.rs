//! Packets of a VM with addresses that are not its own.

use super::frames::{ethernet, icmp6, udp4};
use super::world::*;
use super::{on_host, open, spec, vm};
use rustix::io::write;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

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
    let own = udp4((mine.v4, 9), (far, 9));
    write(tap, &ethernet(mine.mac, 0x0800, &own)).expect("sent");
    assert_eq!(counted(&mut host), 0);

    let host_mac = crate::identity::GATEWAY_MAC;
    let mut spoofed = vec![
        (
            "another's address",
            ethernet(mine.mac, 0x0800, &udp4((theirs.v4, 9), (far, 9))),
        ),
        (
            "the gateway's address",
            ethernet(mine.mac, 0x0800, &udp4((mine.gateway, 9), (far, 9))),
        ),
        (
            "a public address",
            ethernet(mine.mac, 0x0800, &udp4((far, 9), (far, 9))),
        ),
        ("another's MAC", ethernet(theirs.mac, 0x0800, &own)),
        ("the host's MAC", ethernet(host_mac, 0x0800, &own)),
        (
            "to the host's loopback",
            ethernet(
                mine.mac,
                0x0800,
                &udp4((mine.v4, 9), (Ipv4Addr::LOCALHOST, 9)),
            ),
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
