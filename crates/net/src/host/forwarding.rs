//! Enables forwarding of VMs' packets and of the answers.
//!
//! IPv4: a link forwards incoming packets if `net.ipv4.conf.LINK.forwarding` is set. VMs' links are
//! created with it. It is also set on the links of the host's routes, unless the host forwards
//! anyway; our table then drops incoming packets there that are not for VMs.
//!
//! IPv6: `net.ipv6.conf.all.forwarding` makes the host a router, which no longer configures its own
//! addresses from router advertisements. So Jiffy never sets it. VMs have IPv6 if it is set
//! already, or if the kernel has `force_forwarding` (Linux 6.17), which is per link like that of
//! IPv4.

use crate::links::found::{Link, Route};
use crate::{Error, links, sysctl};
use std::collections::BTreeSet;

/// How VMs' IPv6 packets are forwarded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ipv6 {
    /// VMs have no IPv6, for this reason.
    Off(&'static str),
    /// The host forwards everything.
    Host,
    /// Forwarding is set for each link (`force_forwarding`).
    ByLink,
}

/// The forwarding settings that were made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Forwarding {
    ipv6: Ipv6,
    /// Links where forwarding of IPv4 was set for VMs.
    pub uplinks: Vec<(u32, String)>,
    /// Links where forwarding of IPv6 was set for VMs.
    pub uplinks6: Vec<(u32, String)>,
    /// There is a default route for IPv6.
    pub outwards6: bool,
}

impl Forwarding {
    /// Enables forwarding where it is needed. `before` are the links where an earlier process has
    /// enabled it, for IPv4 and IPv6.
    ///
    /// # Errors
    ///
    /// If a setting of a link can't be written.
    pub fn set(
        wanted6: bool,
        found: &[Link],
        routes: &[Route],
        before: [&BTreeSet<u32>; 2],
    ) -> Result<Forwarding, Error> {
        let all4 = sysctl::read("ipv4/ip_forward") == Some(1);
        let uplinks = if all4 {
            Vec::new()
        } else {
            set(found, routes, true, before[0])?
        };
        let ipv6 = match sysctl::read("ipv6/conf/all/forwarding") {
            _ if !wanted6 => Ipv6::Off("it is turned off"),
            None => Ipv6::Off("the host has no IPv6"),
            Some(1) => Ipv6::Host,
            Some(_) if sysctl::read("ipv6/conf/all/force_forwarding").is_some() => Ipv6::ByLink,
            Some(_) => Ipv6::Off(
                "net.ipv6.conf.all.forwarding is 0, and this kernel has no force_forwarding (Linux 6.17)",
            ),
        };
        let uplinks6 = if ipv6 == Ipv6::ByLink {
            set(found, routes, false, before[1])?
        } else {
            Vec::new()
        };
        let default6 = |it: &Route| it.to.prefix() == 0 && it.to.first().is_ipv6() && it.unicast;
        Ok(Forwarding {
            ipv6,
            uplinks,
            uplinks6,
            outwards6: routes.iter().any(default6),
        })
    }

    /// Takes over later settings. Whether VMs have IPv6 stays as it was: they have got their
    /// addresses.
    pub fn follow(&mut self, later: Forwarding) {
        if later.ipv6 == self.ipv6 {
            *self = later;
        } else {
            self.uplinks = later.uplinks;
        }
    }

    /// Whether VMs have IPv6.
    pub fn ipv6(&self) -> bool {
        !matches!(self.ipv6, Ipv6::Off(_))
    }

    /// Why VMs have none.
    pub fn no_ipv6(&self) -> Option<&'static str> {
        match self.ipv6 {
            Ipv6::Off(why) => Some(why),
            _ => None,
        }
    }

    /// Called after a VM's link was created; it forwards IPv4 already.
    ///
    /// # Errors
    ///
    /// If its setting for IPv6 can't be written.
    pub fn link_made(&self, name: &str) -> Result<(), Error> {
        if self.ipv6 == Ipv6::ByLink {
            sysctl::write(&setting(name, false), 1)?;
        }
        Ok(())
    }

    /// The settings, as `sysctl` writes them.
    pub fn settings(&self) -> Vec<String> {
        let written =
            |it: &(u32, String), v4| format!("net.{}=1", setting(&it.1, v4).replace('/', "."));
        let v4 = self.uplinks.iter().map(|it| written(it, true));
        v4.chain(self.uplinks6.iter().map(|it| written(it, false)))
            .collect()
    }

    /// Reverts the settings, unless the host forwards everything meanwhile.
    ///
    /// # Errors
    ///
    /// If a setting of a link that still exists can't be written.
    pub fn unset(&self) -> Result<(), Error> {
        if sysctl::read("ipv4/ip_forward") != Some(1) {
            for (_, name) in &self.uplinks {
                sysctl::write_if_there(&setting(name, true), 0)?;
            }
        }
        for (_, name) in &self.uplinks6 {
            sysctl::write_if_there(&setting(name, false), 0)?;
        }
        Ok(())
    }
}

fn setting(link: &str, v4: bool) -> String {
    if v4 {
        format!("ipv4/conf/{link}/forwarding")
    } else {
        format!("ipv6/conf/{link}/force_forwarding")
    }
}

/// Enables forwarding on the links of routes where it is not enabled. Returns those links, and
/// those of `before`.
fn set(
    found: &[Link],
    routes: &[Route],
    v4: bool,
    before: &BTreeSet<u32>,
) -> Result<Vec<(u32, String)>, Error> {
    let used: BTreeSet<u32> = routes
        .iter()
        .filter(|it| it.unicast && it.to.first().is_ipv4() == v4)
        .flat_map(|it| it.links.iter().copied())
        .collect();
    let mut uplinks = Vec::new();
    for link in found {
        if !used.contains(&link.index) || link.loopback || links::is_ours(link) {
            continue;
        }
        let name = setting(&link.name, v4);
        let on = sysctl::read(&name) == Some(1);
        if !on {
            sysctl::write(&name, 1)?;
        }
        if !on || before.contains(&link.index) {
            uplinks.push((link.index, link.name.clone()));
        }
    }
    Ok(uplinks)
}
