//! Reads links, routes, addresses and neighbours as the kernel lists them.
//!
//! Only the attributes that are needed are parsed, so that a kernel may add or change others.

use crate::netlink::channel::find;
use crate::netlink::{Batch, Channel, flags};
use crate::{Cidr, Error, Refusal};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// rtnetlink(7), linux/rtnetlink.h.
const RTM_GETLINK: u16 = 18;
const RTM_GETADDR: u16 = 22;
const RTM_GETROUTE: u16 = 26;
const RTM_GETNEIGH: u16 = 30;
const IFLA_IFNAME: u16 = 3;
const IFLA_STATS64: u16 = 23;
const IFLA_GROUP: u16 = 27;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
const RTA_PRIORITY: u16 = 6;
const RTA_MULTIPATH: u16 = 9;
const NDA_DST: u16 = 1;
/// Bytes of the fixed structures before the attributes.
const IFINFOMSG: usize = 16;
const IFADDRMSG: usize = 8;
const RTMSG: usize = 12;
const NDMSG: usize = 12;
const RTNEXTHOP: usize = 8;
const RTN_UNICAST: u8 = 1;
const RTN_BROADCAST: u8 = 3;
const RTN_MULTICAST: u8 = 5;
const IFF_LOOPBACK: u32 = 8;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;

/// A link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// Its index in this network namespace.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// Its group.
    pub group: u32,
    /// Is it the loopback?
    pub loopback: bool,
}

/// All links.
pub(crate) fn links(route: &mut Channel) -> Result<Vec<Link>, Error> {
    let request = || dump(RTM_GETLINK, &[0; IFINFOMSG]);
    let list = route.dump(request, |_, body| Ok(link(body)));
    list.map_err(Error::kernel("listing links"))
}

fn link(body: &[u8]) -> Option<Link> {
    let (header, attributes) = body.split_at_checked(IFINFOMSG)?;
    let name = find(attributes, IFLA_IFNAME)?;
    let group = find(attributes, IFLA_GROUP).and_then(number).unwrap_or(0);
    Some(Link {
        index: number(&header[4..8])?,
        name: String::from_utf8_lossy(name.strip_suffix(&[0]).unwrap_or(name)).into_owned(),
        group,
        loopback: number(&header[8..12])? & IFF_LOOPBACK != 0,
    })
}

/// Traffic counters of a VM.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Packets that the VM sent.
    pub sent_packets: u64,
    /// Bytes that the VM sent.
    pub sent_bytes: u64,
    /// Packets that the VM received.
    pub received_packets: u64,
    /// Bytes that the VM received.
    pub received_bytes: u64,
    /// Packets dropped because its queue was full.
    pub overflowed: u64,
}

/// The traffic of a link. The link receives what the VM sends.
pub(crate) fn traffic(route: &mut Channel, link: u32) -> Result<Traffic, Error> {
    let mut header = [0; IFINFOMSG];
    header[4..8].copy_from_slice(&link.to_ne_bytes());
    let mut batch = Batch::new();
    batch.message(RTM_GETLINK, 0, |it| _ = it.fixed(&header));
    let found = route.get(batch, |_, body| {
        let attributes = body.get(IFINFOMSG..).unwrap_or(&[]);
        let counts = find(attributes, IFLA_STATS64).unwrap_or(&[]);
        let count = |place: usize| {
            let bytes = counts.get(place * 8..place * 8 + 8);
            let bytes = bytes.and_then(|it| it.try_into().ok());
            bytes.map_or(0, u64::from_ne_bytes)
        };
        // `struct rtnl_link_stats64`.
        Ok(Traffic {
            sent_packets: count(0),
            received_packets: count(1),
            sent_bytes: count(2),
            received_bytes: count(3),
            overflowed: count(7),
        })
    });
    let found = found.map_err(Error::kernel("reading a link's counters"))?;
    Ok(found.unwrap_or_default())
}

/// A route; broadcast and multicast routes are skipped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// Its destination.
    pub to: Cidr,
    /// The link, if there is exactly one.
    pub link: Option<u32>,
    /// All its outgoing links.
    pub links: Vec<u32>,
    /// Its origin (`rtm_protocol`).
    pub protocol: u8,
    /// Its metric.
    pub metric: u32,
    /// Whether it is a unicast route, which forwards packets to a link.
    pub unicast: bool,
}

/// The routes of all tables.
pub(crate) fn routes(route: &mut Channel) -> Result<Vec<Route>, Error> {
    let request = || dump(RTM_GETROUTE, &[0; RTMSG]);
    let list = route.dump(request, |_, body| Ok(route_of(body)));
    list.map_err(Error::kernel("listing routes"))
}

fn route_of(body: &[u8]) -> Option<Route> {
    let (header, attributes) = body.split_at_checked(RTMSG)?;
    let [family, prefix, _, _, _, protocol, _, kind, ..] = *header else {
        return None;
    };
    if matches!(kind, RTN_BROADCAST | RTN_MULTICAST) {
        return None;
    }
    let first = match find(attributes, RTA_DST) {
        Some(it) => ip(family, it)?,
        None if family == AF_INET => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        None if family == AF_INET6 => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        None => return None,
    };
    let link = find(attributes, RTA_OIF).and_then(number);
    let mut links = hops(find(attributes, RTA_MULTIPATH).unwrap_or(&[]));
    links.extend(link);
    // In IPv6, the kernel lists unreachable routes on the loopback.
    let unicast = kind == RTN_UNICAST;
    Some(Route {
        to: Cidr::new(first, prefix)?,
        link: link.filter(|_| unicast),
        links,
        protocol,
        metric: find(attributes, RTA_PRIORITY).and_then(number).unwrap_or(0),
        unicast,
    })
}

/// The links of a multipath route (`struct rtnexthop`).
fn hops(mut bytes: &[u8]) -> Vec<u32> {
    let mut links = Vec::new();
    while let Some(header) = bytes.get(..RTNEXTHOP) {
        links.extend(number(&header[4..8]));
        let length = usize::from(u16::from_ne_bytes([header[0], header[1]]));
        let next = length.max(RTNEXTHOP).next_multiple_of(4);
        bytes = bytes.get(next..).unwrap_or(&[]);
    }
    links
}

/// The addresses of one link, with their prefixes.
pub(crate) fn addresses(route: &mut Channel, link: u32) -> Result<Vec<(IpAddr, u8)>, Error> {
    let all = all_addresses(route)?.into_iter();
    Ok(all
        .filter(|it| it.0 == link)
        .map(|it| (it.1, it.2))
        .collect())
}

/// The host's own IPv4 addresses, on all links. Needs no privileges.
///
/// # Errors
///
/// If a netlink socket can't be opened, or the kernel refuses to list the addresses.
pub fn own_v4() -> Result<Vec<Ipv4Addr>, Error> {
    let mut route = Channel::route()
        .map_err(|error| Error::kernel("opening a netlink socket")(Refusal::Socket(error)))?;
    let all = all_addresses(&mut route)?.into_iter();
    Ok(all
        .filter_map(|(_, address, _)| match address {
            IpAddr::V4(v4) => Some(v4),
            IpAddr::V6(_) => None,
        })
        .collect())
}

/// The addresses of all links: link, address, prefix.
pub(crate) fn all_addresses(route: &mut Channel) -> Result<Vec<(u32, IpAddr, u8)>, Error> {
    let request = || dump(RTM_GETADDR, &[0; IFADDRMSG]);
    let list = route.dump(request, |_, body| Ok(address(body)));
    list.map_err(Error::kernel("listing addresses"))
}

fn address(body: &[u8]) -> Option<(u32, IpAddr, u8)> {
    let (header, attributes) = body.split_at_checked(IFADDRMSG)?;
    let address = find(attributes, IFA_LOCAL).or_else(|| find(attributes, IFA_ADDRESS))?;
    Some((number(&header[4..8])?, ip(header[0], address)?, header[1]))
}

/// The neighbours of a link, permanent entries included.
pub(crate) fn neighbours(route: &mut Channel, link: u32) -> Result<Vec<IpAddr>, Error> {
    let request = || dump(RTM_GETNEIGH, &[0; NDMSG]);
    let list = route.dump(request, |_, body| Ok(neighbour(body, link)));
    list.map_err(Error::kernel("listing neighbours"))
}

fn neighbour(body: &[u8], link: u32) -> Option<IpAddr> {
    let (header, attributes) = body.split_at_checked(NDMSG)?;
    let here = number(&header[4..8])? == link;
    let address = ip(header[0], find(attributes, NDA_DST)?)?;
    (here && !address.is_multicast()).then_some(address)
}

fn dump(kind: u16, header: &[u8]) -> Batch {
    let mut batch = Batch::new();
    batch.message(kind, flags::DUMP, |body| {
        body.fixed(header);
    });
    batch
}

fn number(bytes: &[u8]) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?))
}

fn ip(family: u8, bytes: &[u8]) -> Option<IpAddr> {
    match family {
        AF_INET => Some(IpAddr::from(<[u8; 4]>::try_from(bytes).ok()?)),
        AF_INET6 => Some(IpAddr::from(<[u8; 16]>::try_from(bytes).ok()?)),
        _ => None,
    }
}
