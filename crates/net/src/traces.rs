//! Counts what the kernel has for VMs.

use crate::links::{self, found};
use crate::netlink::{Channel, Refusal};
use crate::nft::read;
use crate::rules::{TABLE, netfilter};
use crate::{Error, conntrack};
use std::collections::{BTreeMap, BTreeSet};

/// What the network namespace of a thread contains for VMs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Traces {
    /// Names of VMs' links, and of the host's.
    pub links: BTreeSet<String>,
    /// Number of routes to these links, and of those without a link.
    pub routes: usize,
    /// Number of neighbours of these links, and of all others.
    pub neighbours: usize,
    /// Names of the table's chains.
    pub chains: BTreeSet<String>,
    /// Number of the elements of each set of the table.
    pub elements: BTreeMap<String, usize>,
    /// Number of tracked connections of all programs.
    pub connections: usize,
}

impl Traces {
    /// Those of this thread's namespace.
    pub fn find() -> Result<Traces, Error> {
        let mut route = Channel::route()
            .map_err(|error| Error::kernel("opening a netlink socket")(Refusal::Socket(error)))?;
        let mut netfilter = netfilter()?;
        let all = found::links(&mut route)?;
        let ours: Vec<_> = all.iter().filter(|it| links::is_ours(it)).collect();
        let of_ours = |it: &found::Route| {
            let linked = |index: &u32| ours.iter().any(|link| link.index == *index);
            it.protocol == links::ROUTE_PROTOCOL || it.links.iter().any(linked)
        };
        let routes = found::routes(&mut route)?
            .iter()
            .filter(|it| of_ours(it))
            .count();
        let mut neighbours = 0;
        for link in &all {
            neighbours += found::neighbours(&mut route, link.index)?.len();
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
        Ok(Traces {
            links: ours.iter().map(|it| it.name.clone()).collect(),
            routes,
            neighbours,
            chains: chains.map(|it| it.name).collect(),
            elements,
            connections: conntrack::list(&mut netfilter)?.len(),
        })
    }
}
