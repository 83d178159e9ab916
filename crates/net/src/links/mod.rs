//! Links, and the addresses, routes and neighbours on them.
//!
//! Each VM has a TAP, a route to its one IPv4 and its one IPv6 address, and a permanent neighbour
//! entry with its MAC address. The host's own address in the VMs' range is on a separate link,
//! `jf-host`, which carries no packets.
//!
//! * [`messages`]: the rtnetlink requests.
//! * [`found`]: reads links, routes, addresses and neighbours.

pub mod found;
mod messages;

use crate::Error;
use crate::identity::VmId;
use crate::netlink::{Batch, Channel};
use crate::pool::Ranges;
use jiffy_sys::tap::{Tap, TapOptions};
use rustix::io::Errno;
use std::net::{Ipv4Addr, Ipv6Addr};

/// The group of all our links; rules match it (`iifgroup`).
pub const GROUP: u32 = 0x6a66;
/// The link that has the host's own address of the VMs' range.
pub const HOST_LINK: &str = "jf-host";
/// The origin of our routes (`rtm_protocol`; values from 17 on are not reserved).
pub const ROUTE_PROTOCOL: u8 = 106;

/// One VM's link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkSpec {
    /// Its VM.
    pub vm: VmId,
    /// The VM's IPv4 address.
    pub v4: Ipv4Addr,
    /// The VM's IPv6 address, if VMs have IPv6.
    pub v6: Option<Ipv6Addr>,
    /// The MTU, bytes.
    pub mtu: u32,
    /// Pairs of queues.
    pub queues: u16,
    /// The user who may attach to the TAP.
    pub owner: Option<u32>,
    /// Allows packets to the VM with the host's loopback addresses as their source until rules
    /// translate them: for ports published on loopback (`route_localnet`).
    pub loopback: bool,
}

/// Whether a link is ours, by its group or its name.
pub(crate) fn is_ours(link: &found::Link) -> bool {
    link.group == GROUP || link.name == HOST_LINK || VmId::of_link(&link.name).is_some()
}

/// Creates the link of a VM and configures it.
pub(crate) fn create(route: &mut Channel, spec: &LinkSpec, ranges: Ranges) -> Result<Tap, Error> {
    let name = spec.vm.link_c();
    let tap = Tap::create(&TapOptions {
        name: &name,
        queues: spec.queues,
        owner: spec.owner,
        offloads: true,
        persistent: false,
    });
    let tap = tap.map_err(|source| tap_error(spec.vm.link(), source))?;
    configure(route, spec, tap.index, ranges)?;
    Ok(tap)
}

/// Configures an existing link.
pub(crate) fn configure(
    route: &mut Channel,
    spec: &LinkSpec,
    index: u32,
    ranges: Ranges,
) -> Result<(), Error> {
    let mut batch = Batch::new();
    messages::set_up(&mut batch, index, spec.mtu, spec.loopback);
    messages::reach(&mut batch, index, spec.v4.into(), spec.vm.mac(), ranges);
    if let Some(v6) = spec.v6 {
        messages::reach(&mut batch, index, v6.into(), spec.vm.mac(), ranges);
    }
    let last = batch.len() - 1;
    route
        .transact(batch, last)
        .map_err(Error::kernel("setting up a VM's link"))
}

/// Removes a link. It is no error if the link does not exist.
pub(crate) fn remove(route: &mut Channel, index: u32) -> Result<(), Error> {
    let mut batch = Batch::new();
    messages::delete_link(&mut batch, index);
    match route.transact(batch, 0) {
        Err(refusal) if refusal.errno() == Some(Errno::NODEV) => Ok(()),
        other => other.map_err(Error::kernel("removing a link")),
    }
}

/// Creates the link with the host's own addresses, and the routes that make unused addresses
/// unreachable, or completes existing ones. Returns the link's index.
pub(crate) fn ensure_host(route: &mut Channel, ranges: Ranges) -> Result<u32, Error> {
    let name = std::ffi::CString::new(HOST_LINK).unwrap_or_default();
    let there = found::links(route)?;
    let index = match there.iter().find(|it| it.name == HOST_LINK) {
        Some(link) => link.index,
        None => {
            let tap = Tap::create(&TapOptions {
                name: &name,
                queues: 1,
                owner: None,
                offloads: false,
                persistent: true,
            });
            tap.map_err(|source| tap_error(HOST_LINK.to_owned(), source))?
                .index
        }
    };
    for (address, prefix) in found::addresses(route, index)? {
        let ours = address == ranges.gateway() || address == ranges.gateway6();
        if !ours {
            let mut batch = Batch::new();
            messages::delete_address(&mut batch, index, address, prefix);
            let removed = route.transact(batch, 0);
            removed.map_err(Error::kernel("removing an outdated address of jf-host"))?;
        }
    }
    let mut batch = Batch::new();
    messages::set_up_host(&mut batch, index);
    messages::address(&mut batch, index, ranges.gateway().into());
    messages::unreachable(&mut batch, ranges.v4());
    let last = batch.len() - 1;
    let set = route.transact(batch, last);
    set.map_err(Error::kernel(
        "giving the host its address in the VMs' range",
    ))?;
    Ok(index)
}

/// As [`ensure_host`], for IPv6, which a host may lack.
pub(crate) fn ensure_host6(route: &mut Channel, index: u32, ranges: Ranges) -> Result<(), Error> {
    let mut batch = Batch::new();
    messages::address(&mut batch, index, ranges.gateway6().into());
    messages::unreachable(&mut batch, ranges.v6());
    let set = route.transact(batch, 1);
    set.map_err(Error::kernel(
        "giving the host its address in the VMs' IPv6 range",
    ))
}

/// Removes our routes that are on no link: those that make unused addresses unreachable.
pub(crate) fn remove_routes(route: &mut Channel, keep: Option<Ranges>) -> Result<usize, Error> {
    let ours = found::routes(route)?.into_iter().filter(|it| {
        it.protocol == ROUTE_PROTOCOL
            && it.link.is_none()
            && keep.is_none_or(|ranges| it.to != ranges.v4() && it.to != ranges.v6())
    });
    let mut removed = 0;
    for leftover in ours {
        let mut batch = Batch::new();
        messages::delete_unreachable(&mut batch, leftover.to);
        let gone = route.transact(batch, 0);
        gone.map_err(Error::kernel(
            "removing an outdated route of VMs' addresses",
        ))?;
        removed += 1;
    }
    Ok(removed)
}

/// Removes the routes, addresses and neighbours of a VM's link that are not in `spec`.
pub(crate) fn remove_stale(
    route: &mut Channel,
    spec: &LinkSpec,
    index: u32,
) -> Result<usize, Error> {
    let mine = |address| {
        address == std::net::IpAddr::V4(spec.v4) || Some(address) == spec.v6.map(Into::into)
    };
    let mut batches = Vec::new();
    for it in found::routes(route)? {
        if it.link == Some(index) && it.protocol == ROUTE_PROTOCOL && !mine(it.to.first()) {
            let mut batch = Batch::new();
            messages::delete_route(&mut batch, index, it.to);
            batches.push(batch);
        }
    }
    for address in found::neighbours(route, index)? {
        if !mine(address) {
            let mut batch = Batch::new();
            messages::delete_neighbour(&mut batch, index, address);
            batches.push(batch);
        }
    }
    let removed = batches.len();
    for batch in batches {
        match route.transact(batch, 0) {
            Err(it) if matches!(it.errno(), Some(Errno::NOENT | Errno::SRCH)) => {}
            other => other.map_err(Error::kernel(
                "removing outdated routes and neighbours of a VM's link",
            ))?,
        }
    }
    Ok(removed)
}

fn tap_error(name: String, source: std::io::Error) -> Error {
    match Errno::from_io_error(&source) {
        Some(Errno::PERM) => Error::Permission,
        _ => Error::Tap { name, source },
    }
}
