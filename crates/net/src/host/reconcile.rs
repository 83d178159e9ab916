//! Makes links, routes, rules and settings match the records.

use super::forwarding::Forwarding;
use super::{GuestSpec, Host, HostOptions, Report, by_vm};
use crate::conntrack::{self, Connection};
use crate::links::found::Link;
use crate::netlink::{Channel, Refusal};
use crate::pool::choose::{choose_v4, choose_v6};
use crate::pool::{Pool, Ranges};
use crate::rules::table::{Base, Connections};
use crate::rules::{self, Rules, netfilter};
use crate::{Cidr, Error, VmId, firewalls, links, sysctl};
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

pub(super) fn open(
    options: HostOptions,
    guests: &[GuestSpec],
    networks: &BTreeSet<String>,
) -> Result<(Host, Report), Error> {
    let mut route = Channel::route()
        .map_err(|error| Error::kernel("opening a netlink socket")(Refusal::Socket(error)))?;
    let ranges = ranges(&mut route, &options)?;
    let mut host = Host {
        rules: Rules::new(Base::new(ranges))?,
        netfilter: netfilter()?,
        pool: Pool::new(ranges),
        forwarding: Forwarding::set(false, &[], &[], [&BTreeSet::new(); 2])?,
        released: BTreeSet::new(),
        options,
        route,
    };
    let mut displaced = Vec::new();
    for guest in guests {
        if !host.pool.claim(guest.v4) {
            displaced.push(guest.vm);
        }
    }
    let report = run(&mut host, guests, networks)?;
    Ok((
        host,
        Report {
            displaced,
            ..report
        },
    ))
}

/// The operator's ranges, or ranges that overlap none of the host's routes.
fn ranges(route: &mut Channel, options: &HostOptions) -> Result<Ranges, Error> {
    let there = links::found::links(route)?;
    let ours: BTreeSet<u32> = there
        .iter()
        .filter(|it| links::is_ours(it))
        .map(|it| it.index)
        .collect();
    let mut taken: Vec<Cidr> = Vec::new();
    for it in links::found::routes(route)? {
        let ours =
            it.protocol == links::ROUTE_PROTOCOL || it.links.iter().any(|it| ours.contains(it));
        if !ours && it.to.prefix() != 0 {
            taken.push(it.to);
        }
    }
    let ranges = Ranges::new(
        options.v4.map_or_else(|| choose_v4(&taken), Ok)?,
        options
            .v6
            .map_or_else(|| choose_v6(&taken, options.seed), Ok)?,
    )?;
    for pool in [ranges.v4(), ranges.v6()] {
        if let Some(route) = taken.iter().find(|it| it.overlaps(pool)) {
            let (pool, route) = (pool.to_string(), route.to_string());
            return Err(Error::PoolTaken { pool, route });
        }
    }
    Ok(ranges)
}

pub(super) fn run(
    host: &mut Host,
    guests: &[GuestSpec],
    networks: &BTreeSet<String>,
) -> Result<Report, Error> {
    let ranges = host.ranges();
    let wanted = by_vm(guests);
    let found = links::found::links(&mut host.route)?;
    let (kept, removed_links) = keep_links(&mut host.route, &found, &wanted)?;

    let routes = links::found::routes(&mut host.route)?;
    let mut before = rules::uplinks(&mut host.netfilter)?;
    before[0].extend(indexes(&host.forwarding.uplinks));
    before[1].extend(indexes(&host.forwarding.uplinks6));
    host.forwarding =
        Forwarding::set(host.options.ipv6, &found, &routes, [&before[0], &before[1]])?;
    let index = links::ensure_host(&mut host.route, ranges)?;
    if host.forwarding.ipv6() {
        links::ensure_host6(&mut host.route, index, ranges)?;
    }
    let mut removed_routes = links::remove_routes(&mut host.route, Some(ranges))?;
    let mut rules = Vec::new();
    let mut without_link = Vec::new();
    for guest in guests {
        let Some(link) = kept.get(&guest.vm) else {
            without_link.push(guest.vm);
            continue;
        };
        match keep_link(host, guest, *link) {
            Ok(removed) => removed_routes += removed,
            // The VM's monitor, which held the link, has just ended.
            Err(_)
                if !links::found::links(&mut host.route)?
                    .iter()
                    .any(|it| it.index == *link) =>
            {
                without_link.push(guest.vm);
                continue;
            }
            Err(error) => return Err(error),
        }
        rules.push(host.guest_rules(guest, *link));
    }
    let base = base(host);
    host.rules.replace(base, networks.clone(), rules)?;
    let forgotten = forget_stale_connections(host, guests)?;
    Ok(Report {
        ranges,
        removed_links,
        removed_routes,
        forgotten,
        without_link,
        displaced: Vec::new(),
        settings: host.forwarding.settings(),
        no_ipv6: host.forwarding.no_ipv6(),
        blockers: firewalls::find(&mut host.netfilter)?,
    })
}

/// See [`Host::reconcile_rules`].
pub(super) fn rules(host: &mut Host) -> Result<bool, Error> {
    let found = links::found::links(&mut host.route)?;
    let routes = links::found::routes(&mut host.route)?;
    let mut before = [BTreeSet::new(), BTreeSet::new()];
    before[0].extend(indexes(&host.forwarding.uplinks));
    before[1].extend(indexes(&host.forwarding.uplinks6));
    let now = Forwarding::set(host.options.ipv6, &found, &routes, [&before[0], &before[1]])?;
    host.forwarding.follow(now);
    let base = base(host);
    host.rules.reconcile(base)
}

/// The settings of the table for all VMs.
fn base(host: &Host) -> Base {
    Base {
        outwards6: host.forwarding.ipv6() && host.forwarding.outwards6,
        uplinks: indexes(&host.forwarding.uplinks),
        uplinks6: indexes(&host.forwarding.uplinks6),
        name_port: host.options.name_port,
        never: host.options.never.clone(),
        connections: connections(),
        ..Base::new(host.ranges())
    }
}

/// The limits of one VM's connections: a part of those that the host can have.
fn connections() -> Connections {
    match sysctl::number("netfilter/nf_conntrack_max") {
        None | Some(0) => Connections::default(),
        Some(host) => Connections::of(host),
    }
}

/// Completes the link of a VM, and removes routes and neighbours that are not the VM's. Returns
/// their number.
fn keep_link(host: &mut Host, guest: &GuestSpec, link: u32) -> Result<usize, Error> {
    let (spec, ranges) = (host.link_spec(guest), host.ranges());
    links::configure(&mut host.route, &spec, link, ranges)?;
    let removed = links::remove_stale(&mut host.route, &spec, link)?;
    host.forwarding.link_made(&guest.vm.link())?;
    Ok(removed)
}

fn indexes(links: &[(u32, String)]) -> Vec<u32> {
    links.iter().map(|it| it.0).collect()
}

/// Removes links that belong to no VM. Returns the others, and the names of the removed ones.
fn keep_links(
    route: &mut Channel,
    found: &[Link],
    wanted: &BTreeMap<VmId, &GuestSpec>,
) -> Result<(BTreeMap<VmId, u32>, Vec<String>), Error> {
    let mut kept = BTreeMap::new();
    let mut removed = Vec::new();
    for link in found
        .iter()
        .filter(|it| links::is_ours(it) && it.name != links::HOST_LINK)
    {
        match VmId::of_link(&link.name).filter(|it| wanted.contains_key(it)) {
            Some(vm) => _ = kept.insert(vm, link.index),
            None => {
                links::remove(route, link.index)?;
                removed.push(link.name.clone());
            }
        }
    }
    Ok((kept, removed))
}

/// Deletes tracked connections of addresses in VMs' ranges that no VM has.
fn forget_stale_connections(host: &mut Host, guests: &[GuestSpec]) -> Result<usize, Error> {
    let ranges = host.ranges();
    let mut known: BTreeSet<IpAddr> = [ranges.gateway().into(), ranges.gateway6().into()].into();
    for guest in guests {
        known.insert(guest.v4.into());
        known.insert(ranges.v6_of(guest.v4).into());
    }
    let stranger = |it: &IpAddr| {
        (ranges.v4().contains(*it) || ranges.v6().contains(*it)) && !known.contains(it)
    };
    let forgotten = conntrack::forget(&mut host.netfilter, |it: &Connection| {
        [it.source, it.destination, it.answers].iter().any(stranger)
    })?;
    host.released.clear();
    Ok(forgotten)
}
