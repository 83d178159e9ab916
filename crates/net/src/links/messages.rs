//! The rtnetlink requests for links (rtnetlink(7)).

use super::{GROUP, ROUTE_PROTOCOL};
use crate::Cidr;
use crate::identity::GATEWAY_MAC;
use crate::netlink::{Batch, flags};
use crate::pool::Ranges;
use jiffy_wire::mac::Mac;
use netlink_packet_route::address::{AddressAttribute, AddressFlags, AddressMessage, AddressScope};
use netlink_packet_route::link::{
    AfSpecInet, AfSpecInet6, AfSpecUnspec, In6AddrGenMode, InetDevConf, LinkAttribute, LinkFlags,
    LinkMessage,
};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use std::net::IpAddr;

/// The metric of routes that any other route overrides.
const LAST_METRIC: u32 = u32::MAX;
/// `rp_filter`: the route back to the source must use the incoming link.
const STRICT: i32 = 1;

/// Sets a VM's link up: with forwarding, without ARP and without automatic addresses.
pub(super) fn set_up(batch: &mut Batch, index: u32, mtu: u32, loopback: bool) {
    let mut conf = InetDevConf::default();
    conf.forwarding = 1;
    conf.rp_filter = STRICT;
    conf.route_localnet = loopback.into();
    let mut message = link(index);
    message.attributes = vec![
        LinkAttribute::Address(GATEWAY_MAC.0.to_vec()),
        LinkAttribute::Mtu(mtu),
        LinkAttribute::Group(GROUP),
        LinkAttribute::AfSpecUnspec(vec![
            AfSpecUnspec::Inet(vec![AfSpecInet::DevConfRequest(conf)]),
            AfSpecUnspec::Inet6(vec![AfSpecInet6::AddrGenMode(In6AddrGenMode::None)]),
        ]),
    ];
    batch.route(RouteNetlinkMessage::SetLink(message), 0);
    up(batch, index);
}

/// Brings up the link with the host's own addresses.
pub(super) fn set_up_host(batch: &mut Batch, index: u32) {
    let mut message = link(index);
    message.attributes = vec![LinkAttribute::AfSpecUnspec(vec![AfSpecUnspec::Inet6(
        vec![AfSpecInet6::AddrGenMode(In6AddrGenMode::None)],
    )])];
    batch.route(RouteNetlinkMessage::SetLink(message), 0);
    up(batch, index);
}

/// Brings a link up, in a message of its own: in one message the kernel would bring the link up
/// before it applies the other settings.
fn up(batch: &mut Batch, index: u32) {
    let mut message = link(index);
    message.header.flags = LinkFlags::Up | LinkFlags::Noarp;
    message.header.change_mask = message.header.flags;
    batch.route(RouteNetlinkMessage::SetLink(message), 0);
}

pub(super) fn delete_link(batch: &mut Batch, index: u32) {
    batch.route(RouteNetlinkMessage::DelLink(link(index)), 0);
}

fn link(index: u32) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message
}

/// Adds the route to a VM's address, and its permanent neighbour entry.
pub(super) fn reach(batch: &mut Batch, index: u32, address: IpAddr, mac: Mac, ranges: Ranges) {
    let mut message = route(Cidr::single(address), RouteType::Unicast);
    message.attributes.push(RouteAttribute::Oif(index));
    if address.is_ipv4() {
        message.header.scope = RouteScope::Link;
    }
    let own = match address {
        IpAddr::V4(_) => RouteAddress::Inet(ranges.gateway()),
        IpAddr::V6(_) => RouteAddress::Inet6(ranges.gateway6()),
    };
    message.attributes.push(RouteAttribute::PrefSource(own));
    let replace = flags::CREATE | flags::REPLACE;
    batch.route(RouteNetlinkMessage::NewRoute(message), replace);
    let mut message = neighbour(index, address);
    message.header.state = NeighbourState::Permanent;
    let mac = NeighbourAttribute::LinkLayerAddress(mac.0.to_vec());
    message.attributes.push(mac);
    batch.route(RouteNetlinkMessage::NewNeighbour(message), replace);
}

pub(super) fn delete_route(batch: &mut Batch, index: u32, to: Cidr) {
    let mut message = route(to, RouteType::Unspec);
    message.header.scope = RouteScope::NoWhere;
    message.attributes.push(RouteAttribute::Oif(index));
    batch.route(RouteNetlinkMessage::DelRoute(message), 0);
}

pub(super) fn delete_neighbour(batch: &mut Batch, index: u32, address: IpAddr) {
    let message = neighbour(index, address);
    batch.route(RouteNetlinkMessage::DelNeighbour(message), 0);
}

fn neighbour(index: u32, address: IpAddr) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = family(address);
    message.header.ifindex = index;
    let address = match address {
        IpAddr::V4(it) => NeighbourAddress::Inet(it),
        IpAddr::V6(it) => NeighbourAddress::Inet6(it),
    };
    let destination = NeighbourAttribute::Destination(address);
    message.attributes.push(destination);
    message
}

/// Adds an address of the host, with the full prefix length.
pub(super) fn address(batch: &mut Batch, index: u32, address: IpAddr) {
    let mut message = address_message(index, address, Cidr::single(address).prefix());
    let quiet = AddressFlags::Nodad | AddressFlags::Noprefixroute;
    message.attributes.push(AddressAttribute::Flags(quiet));
    let replace = flags::CREATE | flags::REPLACE;
    batch.route(RouteNetlinkMessage::NewAddress(message), replace);
}

pub(super) fn delete_address(batch: &mut Batch, index: u32, address: IpAddr, prefix: u8) {
    let message = address_message(index, address, prefix);
    batch.route(RouteNetlinkMessage::DelAddress(message), 0);
}

fn address_message(index: u32, address: IpAddr, prefix: u8) -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header.family = family(address);
    message.header.prefix_len = prefix;
    message.header.scope = AddressScope::Universe;
    message.header.index = index;
    message.attributes = vec![
        AddressAttribute::Local(address),
        AddressAttribute::Address(address),
    ];
    message
}

/// Makes unused addresses of a range unreachable, so that packets to them do not leave by the
/// default route.
pub(super) fn unreachable(batch: &mut Batch, range: Cidr) {
    let mut message = route(range, RouteType::Unreachable);
    message
        .attributes
        .push(RouteAttribute::Priority(LAST_METRIC));
    let replace = flags::CREATE | flags::REPLACE;
    batch.route(RouteNetlinkMessage::NewRoute(message), replace);
}

pub(super) fn delete_unreachable(batch: &mut Batch, range: Cidr) {
    let mut message = route(range, RouteType::Unreachable);
    message
        .attributes
        .push(RouteAttribute::Priority(LAST_METRIC));
    batch.route(RouteNetlinkMessage::DelRoute(message), 0);
}

fn route(to: Cidr, kind: RouteType) -> RouteMessage {
    let mut message = RouteMessage::default();
    message.header = RouteHeader {
        address_family: family(to.first()),
        destination_prefix_length: to.prefix(),
        table: RouteHeader::RT_TABLE_MAIN,
        protocol: RouteProtocol::Other(ROUTE_PROTOCOL),
        scope: RouteScope::Universe,
        kind,
        ..RouteHeader::default()
    };
    let to = match to.first() {
        IpAddr::V4(it) => RouteAddress::Inet(it),
        IpAddr::V6(it) => RouteAddress::Inet6(it),
    };
    message.attributes.push(RouteAttribute::Destination(to));
    message
}

fn family(address: IpAddr) -> AddressFamily {
    match address {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    }
}
