//! The chains and sets that do not depend on VMs.
//!
//! A VM's packets share some things of the host with others: tracked connections, neighbours, the
//! name server's queue, the kernel's limit of ICMP errors. Each has a limit per VM.

use super::rule::{
    self, DESTINATION_PORT, DESTINATION4, DESTINATION6, ICMP_TYPE, ICMP6, Rule, SOURCE_MAC,
    SOURCE4, SOURCE6, TCP,
};
use crate::Cidr;
use crate::nft::constants::{FAMILY_IPV4, FAMILY_IPV6, kind, set};
use crate::nft::expression::{ct, meta};
use crate::nft::{Each, Element, Expression, Hook, Set, Transaction};
use crate::policy;
use crate::pool::Ranges;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Valid sources of packets of VMs: link, MAC and address.
pub(super) const SOURCES4: &str = "sources4";
pub(super) const SOURCES6: &str = "sources6";
/// Links, each with a counter of spoofed packets.
pub(super) const SPOOFED: &str = "spoofed";
/// Links, each with a counter of refused packets.
pub(super) const REFUSED: &str = "refused";
/// Links, each with a counter of packets beyond the VM's limits.
pub(super) const LIMITED: &str = "limited";
/// Links, each with a limit of new connections.
const ARRIVALS: &str = "arrivals";
/// Links, each with a limit of packets to the name server.
const QUERIES: &str = "queries";
/// Links, each with a limit of answers to refused packets.
const ANSWERS: &str = "answers";
/// Links, each with a limit of new neighbours of the host.
const NEIGHBOURS: &str = "neighbours";
/// The sets with a limit for each link.
pub(super) const RATES: [&str; 4] = [ARRIVALS, QUERIES, ANSWERS, NEIGHBOURS];
/// Tracked connections, by link and share. Rules add elements, and the kernel removes those without
/// connections.
const CONNECTIONS: &str = "connections";
/// Neighbours of the host to which VMs have sent lately.
const REACHED4: &str = "reached4";
const REACHED6: &str = "reached6";
/// Maps a link to the chain with its VM's policy.
pub(super) const GUESTS: &str = "guests";
/// Maps a link to the chain with its VM's access to the host.
pub(super) const HOST_ACCESS: &str = "host-access";
/// Addresses that are denied by default.
const CLOSED4: &str = "closed4";
const CLOSED6: &str = "closed6";
/// Links with forwarding enabled for VMs; packets that are not for VMs are dropped there.
pub(super) const UPLINKS4: &str = "uplinks4";
pub(super) const UPLINKS6: &str = "uplinks6";
/// Published ports: by address, protocol and port; and those of all addresses.
pub(super) const PORTS_AT4: &str = "ports-at4";
pub(super) const PORTS_AT6: &str = "ports-at6";
pub(super) const PORTS4: &str = "ports4";
pub(super) const PORTS6: &str = "ports6";

/// The chain of VMs with the default policy.
pub(super) const OPEN: &str = "open";
/// Accepts a packet that the policy allows, within the VM's limits.
pub(super) const ADMIT: &str = "admit";
const OVER: &str = "over";
/// Counts a refused packet, and answers with an error.
pub(super) const REFUSE: &str = "refuse";
const SPOOF: &str = "spoof";
const PUBLISHED: &str = "published";

/// The chains at hooks of the kernel.
const SOURCES: &str = "sources";
const FORWARDED: &str = "forward";
const TO_HOST: &str = "input";
const ARRIVING: &str = "arriving";
const LOCAL: &str = "local";
const LEAVING: &str = "leaving";
/// All chains that do not depend on VMs. None of them is empty.
pub(super) const CHAINS: [&str; 12] = [
    SOURCES, FORWARDED, TO_HOST, ARRIVING, LOCAL, LEAVING, SPOOF, REFUSE, OPEN, PUBLISHED, ADMIT,
    OVER,
];

/// The port at which VMs ask the node's name server.
pub(crate) const NAME_PORT: u16 = 53;

/// A VM's packets to the name server. What comes at once is a small part of its sockets' queue.
const NEW_QUERIES: Each = Each::Over {
    rate: 1000,
    burst: 100,
};
/// Resets and ICMP errors to a VM. Up to Linux 6.10 the kernel sends 1000 ICMP errors a second, to
/// all.
const NEW_ANSWERS: Each = Each::Over {
    rate: 100,
    burst: 100,
};
/// New neighbours of the host because of a VM's packets. The kernel keeps one that does not answer
/// for seconds, and 1024 at most (`gc_thresh3`).
const NEW_NEIGHBOURS: Each = Each::Over {
    rate: 20,
    burst: 100,
};
/// How long a neighbour is not new, milliseconds.
const REACHED_MS: u64 = 10_000;
/// The kernel looks at all connections of a share when it counts a new one, so a VM has many
/// shares. A power of two.
const SHARES: u32 = 64;

/// The settings for all VMs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Base {
    /// VMs' addresses.
    pub ranges: Ranges,
    /// There is an IPv6 route beyond the host.
    pub outwards6: bool,
    /// Links with IPv4 forwarding enabled for VMs.
    pub uplinks: Vec<u32>,
    /// Links with IPv6 forwarding enabled for VMs.
    pub uplinks6: Vec<u32>,
    /// The name server's port at the host's address.
    pub name_port: u16,
    /// Ports of the host that no rule can open to VMs: those of Jiffy's own API.
    pub never: Vec<u16>,
    /// Limits of the connections of one VM.
    pub connections: Connections,
}

/// Limits of the tracked connections of one VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Connections {
    /// Most connections that are open, or were not answered yet.
    pub open: u32,
    /// New connections each second. This also limits closed ones, which the kernel keeps for up to
    /// two minutes and does not count, and the kernel's lists of connections, from which it removes
    /// ended ones more slowly than packets can come.
    pub new: u32,
}

impl Connections {
    /// Parts of a host's limit (`nf_conntrack_max`): one VM uses up less than a third.
    pub fn of(host: u32) -> Connections {
        Connections {
            open: (host / 16).max(1024),
            new: (host / 512).max(32),
        }
    }
}

impl Default for Connections {
    /// Those of a host with 4 GiB of memory or more, for one without a limit.
    fn default() -> Connections {
        Connections::of(262_144)
    }
}

impl Base {
    /// Settings with a name server at port 53, IPv4 only.
    pub fn new(ranges: Ranges) -> Base {
        Base {
            ranges,
            outwards6: false,
            uplinks: Vec::new(),
            uplinks6: Vec::new(),
            name_port: NAME_PORT,
            never: Vec::new(),
            connections: Connections::default(),
        }
    }
}

/// Hooks (`NF_INET_*`) and priorities (nft(8)) of our chains.
const PREROUTING: u32 = 0;
const INPUT: u32 = 1;
const FORWARD: u32 = 2;
const OUTPUT: u32 = 3;
const POSTROUTING: u32 = 4;
const RAW: i32 = -300;
const DESTINATION: i32 = -100;
const FILTER: i32 = 0;
const SOURCE: i32 = 100;

pub(super) fn add(to: &mut Transaction, base: &Base) {
    to.add_table(&[]);
    sets(to, base);
    for plain in [SPOOF, REFUSE, OVER, ADMIT, OPEN, PUBLISHED] {
        to.add_chain(plain, None);
    }
    endings(to);
    admitted(to, base);
    sources(to);
    forwarded(to);
    to_host(to, base);
    translated(to, base);
}

fn sets(to: &mut Transaction, base: &Base) {
    let link = (kind::LINK, 4);
    let verdict = Some((set::DATA_VERDICT, 0));
    let counted = Set {
        key: link,
        each: Some(Each::Counter),
        ..Set::default()
    };
    for set in [SPOOFED, REFUSED, LIMITED] {
        to.add_set(set, &counted);
    }
    limits(to, base);
    let verdicts = Set {
        key: link,
        value: verdict,
        ..Set::default()
    };
    to.add_set(GUESTS, &verdicts);
    to.add_set(HOST_ACCESS, &verdicts);
    let links = Set {
        key: link,
        ..Set::default()
    };
    for (set, uplinks) in [(UPLINKS4, &base.uplinks), (UPLINKS6, &base.uplinks6)] {
        to.add_set(set, &links);
        let uplinks: Vec<_> = uplinks.iter().map(|it| super::link_element(*it)).collect();
        to.add_elements(set, &uplinks);
    }
    let v4 = (kind::IPV4, 4);
    let v6 = (kind::IPV6, 16);
    let port = kind::concatenated(&[kind::PROTOCOL, kind::SERVICE]);
    for (address, sources, closed, at, ports) in [
        (v4, SOURCES4, CLOSED4, PORTS_AT4, PORTS4),
        (v6, SOURCES6, CLOSED6, PORTS_AT6, PORTS6),
    ] {
        let sender = kind::concatenated(&[kind::LINK, kind::ETHER, address.0]);
        let senders = Set {
            key: (sender, 4 + 8 + address.1),
            ..Set::default()
        };
        to.add_set(sources, &senders);
        let ranges = Set {
            flags: set::FLAG_INTERVAL,
            key: address,
            ..Set::default()
        };
        to.add_set(closed, &ranges);
        let target = kind::concatenated(&[address.0, kind::SERVICE]);
        let target = Some((target, address.1 + 4));
        let at_key = kind::concatenated(&[address.0, kind::PROTOCOL, kind::SERVICE]);
        let by_address = Set {
            key: (at_key, address.1 + 8),
            value: target,
            ..Set::default()
        };
        to.add_set(at, &by_address);
        let by_port = Set {
            key: (port, 8),
            value: target,
            ..Set::default()
        };
        to.add_set(ports, &by_port);
    }
    for (set, v4) in [(CLOSED4, true), (CLOSED6, false)] {
        let ranges = policy::closed().filter(|it| it.first().is_ipv4() == v4);
        let elements: Vec<Element> = ranges.flat_map(interval).collect();
        to.add_elements(set, &elements);
    }
}

fn limits(to: &mut Transaction, base: &Base) {
    let arrivals = Each::Over {
        rate: base.connections.new.into(),
        burst: base.connections.new * 4,
    };
    for (set, limit) in [
        (ARRIVALS, arrivals),
        (QUERIES, NEW_QUERIES),
        (ANSWERS, NEW_ANSWERS),
        (NEIGHBOURS, NEW_NEIGHBOURS),
    ] {
        let limited = Set {
            key: (kind::LINK, 4),
            each: Some(limit),
            ..Set::default()
        };
        to.add_set(set, &limited);
    }
    let shares = Set {
        flags: set::FLAG_EVAL,
        key: (kind::concatenated(&[kind::LINK, kind::MARK]), 8),
        ..Set::default()
    };
    to.add_set(CONNECTIONS, &shares);
    for (set, key) in [(REACHED4, (kind::IPV4, 4)), (REACHED6, (kind::IPV6, 16))] {
        let reached = Set {
            flags: set::FLAG_EVAL | set::FLAG_TIMEOUT,
            key,
            ..Set::default()
        };
        to.add_set(set, &reached);
    }
}

/// The two elements that bound a range; a range up to the last address has only one.
fn interval(range: Cidr) -> Vec<Element> {
    let bytes = |it: IpAddr| match it {
        IpAddr::V4(it) => it.octets().to_vec(),
        IpAddr::V6(it) => it.octets().to_vec(),
    };
    let after = match range.last() {
        IpAddr::V4(it) => it
            .to_bits()
            .checked_add(1)
            .map(|it| Ipv4Addr::from_bits(it).into()),
        IpAddr::V6(it) => it
            .to_bits()
            .checked_add(1)
            .map(|it| Ipv6Addr::from_bits(it).into()),
    };
    let mut ends = vec![Element::new(bytes(range.first()))];
    ends.extend(after.map(|it| Element {
        interval_end: true,
        ..Element::new(bytes(it))
    }));
    ends
}

/// The chains for refused and spoofed packets, and for those beyond a limit.
fn endings(to: &mut Transaction) {
    // The lookup counts the packet if the link is in the set.
    to.add_rule(SPOOF, &Rule::new().link_in(SPOOFED).drop());
    to.add_rule(SPOOF, &Rule::new().drop());
    // This rule only counts; it has no verdict.
    to.add_rule(REFUSE, &Rule::new().link_in(REFUSED).only());
    to.add_rule(REFUSE, &Rule::new().link_in(ANSWERS).drop());
    to.add_rule(REFUSE, &Rule::new().protocol(TCP).end(Expression::Reset));
    to.add_rule(REFUSE, &Rule::new().end(Expression::Prohibit));
}

/// Packets that the policy allows, and that belong to no connection that was answered.
fn admitted(to: &mut Transaction, base: &Base) {
    to.add_rule(OVER, &Rule::new().link_in(LIMITED).drop());
    to.add_rule(OVER, &Rule::new().drop());

    let mut rule = |it: Vec<Expression>| to.add_rule(ADMIT, &it);
    for (v4, reached) in [(true, REACHED4), (false, REACHED6)] {
        let hop = || Rule::new().next_hop(v4);
        rule(hop().not_in_set(reached).link_in(NEIGHBOURS).goto(OVER));
        rule(hop().remember(reached, REACHED_MS).only());
    }
    rule(Rule::new().confirmed().accept());
    rule(Rule::new().link_in(ARRIVALS).goto(OVER));
    let most = base.connections.open / SHARES;
    let counted = Rule::new().connections_over(CONNECTIONS, SHARES, most);
    rule(counted.goto(OVER));
    rule(Rule::new().accept());
}

/// Checks first that packets from a VM's link have the VM's addresses.
fn sources(to: &mut Transaction) {
    let hook = Hook {
        kind: "filter",
        hook: PREROUTING,
        priority: RAW,
    };
    to.add_chain(SOURCES, Some(hook));
    let mut rule = |it: Vec<Expression>| to.add_rule(SOURCES, &it);
    rule(Rule::new().not_by_guests().accept());
    // Links with ports published on the loopback have `route_localnet` set, so the kernel would
    // deliver such packets to the host's own programs.
    if let Some(loopback) = Cidr::new(Ipv4Addr::LOCALHOST.into(), 8) {
        rule(Rule::new().destination(loopback).goto(SPOOF));
    }
    rule(sender(Rule::new().v4(), SOURCE4).in_set(SOURCES4).accept());
    // VMs must not send router advertisements and redirects (RFC 4861 §4.2, §4.5).
    for rogue in [134, 137] {
        let icmp = Rule::new().v6().protocol(ICMP6);
        rule(icmp.field(ICMP_TYPE, [rogue]).goto(SPOOF));
    }
    rule(sender(Rule::new().v6(), SOURCE6).in_set(SOURCES6).accept());
    // Every Linux sends multicast listener reports and solicitations; they are dropped without
    // being counted.
    if let Some(local) = Cidr::new(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0).into(), 10) {
        rule(Rule::new().source(local).protocol(ICMP6).drop());
    }
    let unspecified = Cidr::single(Ipv6Addr::UNSPECIFIED.into());
    rule(Rule::new().source(unspecified).protocol(ICMP6).drop());
    rule(Rule::new().goto(SPOOF));
}

fn sender(rule: Rule, address: rule::Field) -> Rule {
    rule.meta(meta::IIF, 0).load(SOURCE_MAC, 1).load(address, 3)
}

/// Packets that the host forwards.
fn forwarded(to: &mut Transaction) {
    let hook = Hook {
        kind: "filter",
        hook: FORWARD,
        priority: FILTER,
    };
    to.add_chain(FORWARDED, Some(hook));
    let mut rule = |it: Vec<Expression>| to.add_rule(FORWARDED, &it);
    let others = || Rule::new().not_by_guests().not_toward_guests();
    rule(others().v4().state(ct::NEW).link_in(UPLINKS4).drop());
    rule(others().v6().state(ct::NEW).link_in(UPLINKS6).drop());
    rule(others().accept());
    rule(Rule::new().state(ct::ESTABLISHED | ct::RELATED).accept());
    // A packet without a tracked connection would leave untranslated, with the VM's own address.
    rule(Rule::new().by_guests().state(ct::INVALID).drop());
    rule(Rule::new().by_guests().by_link(GUESTS));
    rule(Rule::new().by_guests().goto(REFUSE));
    // From outside, VMs can only be reached by published ports.
    rule(Rule::new().redirected().accept());
    rule(Rule::new().drop());

    let mut rule = |it: Vec<Expression>| to.add_rule(OPEN, &it);
    rule(Rule::new().toward_guests().goto(REFUSE));
    rule(
        Rule::new()
            .v4()
            .load(DESTINATION4, 0)
            .in_set(CLOSED4)
            .goto(REFUSE),
    );
    rule(
        Rule::new()
            .v6()
            .load(DESTINATION6, 0)
            .in_set(CLOSED6)
            .goto(REFUSE),
    );
    rule(Rule::new().goto(ADMIT));
}

/// Packets to the host itself.
fn to_host(to: &mut Transaction, base: &Base) {
    let hook = Hook {
        kind: "filter",
        hook: INPUT,
        priority: FILTER,
    };
    to.add_chain(TO_HOST, Some(hook));
    let mut rule = |it: Vec<Expression>| to.add_rule(TO_HOST, &it);
    rule(Rule::new().not_by_guests().accept());
    let queries = || {
        let to_us = |it| Rule::new().destination(it).tcp_or_udp();
        let port = (base.name_port, base.name_port);
        gateways(base).map(|it| to_us(it).ports(port))
    };
    // Also in connections that were answered: a query needs no new one.
    for query in queries() {
        rule(query.link_in(QUERIES).goto(OVER));
    }
    rule(Rule::new().state(ct::ESTABLISHED | ct::RELATED).accept());
    for query in queries() {
        rule(query.goto(ADMIT));
    }
    for port in &base.never {
        let never = Rule::new().protocol(TCP).ports((*port, *port));
        rule(never.goto(REFUSE));
    }
    rule(Rule::new().by_link(HOST_ACCESS));
    rule(Rule::new().goto(REFUSE));
}

fn gateways(base: &Base) -> [Cidr; 2] {
    [
        Cidr::single(base.ranges.gateway().into()),
        Cidr::single(base.ranges.gateway6().into()),
    ]
}

/// Address translation: published ports, and packets that leave the host.
fn translated(to: &mut Transaction, base: &Base) {
    let nat = |hook, priority| {
        Some(Hook {
            kind: "nat",
            hook,
            priority,
        })
    };
    to.add_chain(ARRIVING, nat(PREROUTING, DESTINATION));
    let mut rule = |it: Vec<Expression>| to.add_rule(ARRIVING, &it);
    rule(Rule::new().not_by_guests().goto(PUBLISHED));
    if base.name_port != NAME_PORT {
        name_port(&mut rule, base);
    }
    to.add_chain(LOCAL, nat(OUTPUT, DESTINATION));
    to.add_rule(LOCAL, &Rule::new().goto(PUBLISHED));

    let mut rule = |it: Vec<Expression>| to.add_rule(PUBLISHED, &it);
    for (v4, family, destination, port_at, at, ports) in [
        (true, FAMILY_IPV4, DESTINATION4, 1, PORTS_AT4, PORTS4),
        (false, FAMILY_IPV6, DESTINATION6, 4, PORTS_AT6, PORTS6),
    ] {
        let of_family = || {
            if v4 {
                Rule::new().v4()
            } else {
                Rule::new().v6()
            }
        };
        let by_port = |rule: Rule, first| {
            rule.meta(meta::L4PROTO, first)
                .load(DESTINATION_PORT, first + 1)
        };
        let target = Expression::DestinationNat {
            family,
            address: 0,
            port: port_at,
        };
        let at_address = of_family().tcp_or_udp().load(destination, 0);
        rule(by_port(at_address, port_at).mapped(at).end(target.clone()));
        let anywhere = of_family().tcp_or_udp().at_this_host();
        rule(by_port(anywhere, 0).mapped(ports).end(target));
    }

    to.add_chain(LEAVING, nat(POSTROUTING, SOURCE));
    let mut rule = |it: Vec<Expression>| to.add_rule(LEAVING, &it);
    // Connections of the host from 127.0.0.1 get a source address that a VM can answer to.
    if let Some(loopback) = Cidr::new(Ipv4Addr::LOCALHOST.into(), 8) {
        let gateway = base.ranges.gateway().octets();
        let from_loopback = Rule::new().toward_guests().source(loopback);
        rule(from_loopback.value(gateway, 0).end(Expression::SourceNat {
            family: FAMILY_IPV4,
            address: 0,
        }));
    }
    let outwards = |range| Rule::new().source(range).not_toward_guests();
    rule(outwards(base.ranges.v4()).end(Expression::Masquerade));
    if base.outwards6 {
        rule(outwards(base.ranges.v6()).end(Expression::Masquerade));
    }
}

/// Redirects port 53, if the name server could not bind it.
fn name_port(rule: &mut impl FnMut(Vec<Expression>), base: &Base) {
    let families = [(FAMILY_IPV4, 1), (FAMILY_IPV6, 4)];
    for (gateway, (family, port)) in gateways(base).into_iter().zip(families) {
        let address = match gateway.first() {
            IpAddr::V4(it) => it.octets().to_vec(),
            IpAddr::V6(it) => it.octets().to_vec(),
        };
        let asked = Rule::new().destination(gateway).tcp_or_udp();
        let asked = asked.ports((NAME_PORT, NAME_PORT));
        let there = asked
            .value(address, 0)
            .value(base.name_port.to_be_bytes(), port);
        rule(there.end(Expression::DestinationNat {
            family,
            address: 0,
            port,
        }));
    }
}
