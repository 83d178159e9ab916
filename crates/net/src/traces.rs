//! Counts what the kernel has for VMs.

use crate::links::{self, found};
use crate::netlink::{Channel, Refusal};
use crate::nft::read;
use crate::rules::{TABLE, netfilter};
use crate::{Cidr, Error, conntrack};
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

/// What the network namespace of a thread contains for VMs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Traces {
    /// Names of VMs' links, and of the host's.
    pub links: BTreeSet<String>,
    /// Number of routes to these links, and of those without a link.
    pub routes: usize,
    /// Number of neighbours of these links, and of those with a VM's address on others.
    pub neighbours: usize,
    /// Names of the table's chains.
    pub chains: BTreeSet<String>,
    /// Number of the elements of each set of the table.
    pub elements: BTreeMap<String, usize>,
    /// Number of tracked connections of addresses in VMs' ranges.
    pub connections: usize,
}

impl Traces {
    /// Reads what this thread's namespace contains.
    ///
    /// # Errors
    ///
    /// If a netlink socket can't be opened, or the kernel refuses to list something.
    pub fn find() -> Result<Traces, Error> {
        let mut route = Channel::route()
            .map_err(|error| Error::kernel("opening a netlink socket")(Refusal::Socket(error)))?;
        let mut netfilter = netfilter()?;
        let all = found::links(&mut route)?;
        let ours: Vec<_> = all.iter().filter(|it| links::is_ours(it)).collect();
        let linked = |index: &u32| ours.iter().any(|link| link.index == *index);
        let mut routes = found::routes(&mut route)?;
        routes.retain(|it| it.protocol == links::ROUTE_PROTOCOL || it.links.iter().any(linked));
        // A range has a route that makes its other addresses unreachable.
        let ranges = routes.iter().filter(|it| it.link.is_none()).map(|it| it.to);
        let ranges: Vec<Cidr> = ranges.collect();
        let of_vm = |it: &IpAddr| ranges.iter().any(|range| range.contains(*it));
        let mut neighbours = 0;
        for link in &all {
            let mut found = found::neighbours(&mut route, link.index)?;
            found.retain(|it| linked(&link.index) || of_vm(it));
            neighbours += found.len();
        }
        let failed = "reading the nftables table `inet jiffy`";
        let chains = read::chains(&mut netfilter).map_err(Error::kernel(failed))?;
        let chains = chains.into_iter().filter(|it| it.table == TABLE);
        let mut elements = BTreeMap::new();
        for set in read::sets(&mut netfilter, TABLE).map_err(Error::kernel(failed))? {
            let there = read::elements(&mut netfilter, TABLE, &set);
            let there = there.map_err(Error::kernel(failed))?.len();
            elements.insert(set, there);
        }
        let connections = conntrack::matching(&mut netfilter, |it| {
            [it.source, it.destination, it.answers].iter().any(of_vm)
        })?;
        Ok(Traces {
            links: ours.iter().map(|it| it.name.clone()).collect(),
            routes: routes.len(),
            neighbours,
            chains: chains.map(|it| it.name).collect(),
            elements,
            connections: connections.len(),
        })
    }
}
