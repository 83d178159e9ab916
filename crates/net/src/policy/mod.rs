//! What a VM may reach, and which of its ports are published.
//!
//! Rules that allow override rules that deny, and both override the default: the host itself, other
//! VMs, private, link-local and metadata addresses are denied, everything else is allowed.
//!
//! * [`target`]: the targets of rules, and their syntax.
//! * [`publish`]: published ports of the host.
//! * [`hold`]: sockets that reserve those ports.

pub(crate) mod datagrams;
pub mod hold;
pub mod publish;
pub mod target;

#[cfg(test)]
mod tests;

use crate::Cidr;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
pub use target::{Access, Domain, Protocol, Rule, Target, port_range};

/// Most rules of one VM: each becomes a kernel rule, and packets are checked against them one by
/// one.
pub const RULES: usize = 256;

/// How one VM's access differs from the default.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Policy {
    /// Targets that are allowed, even if they are also denied.
    pub allow: Vec<Rule>,
    /// Targets that are denied, unless they are allowed.
    pub deny: Vec<Rule>,
}

impl Policy {
    /// Whether it is the default.
    pub fn is_default(&self) -> bool {
        self.allow.is_empty() && self.deny.is_empty()
    }

    /// Whether a name resolves. `name` must be in lower case without a trailing dot.
    ///
    /// An allowed name resolves. A denied one does not, and if everything is denied, no other name
    /// does.
    pub fn resolves(&self, name: &str) -> bool {
        let listed = |rules| self.domains(rules).any(|(it, _)| it.covers(name));
        listed(&self.allow) || !(listed(&self.deny) || self.denies_everything())
    }

    /// The ports and protocols at which the addresses of a name are opened because of rules about
    /// the name.
    pub fn opened_at(&self, name: &str) -> BTreeSet<Access> {
        let covering = self.domains(&self.allow).filter(|(it, _)| it.covers(name));
        covering.map(|(_, rule)| rule.access()).collect()
    }

    /// The allowed names, by the ports and protocols at which their addresses are opened.
    pub fn named(&self) -> BTreeMap<Access, BTreeSet<&Domain>> {
        let mut named: BTreeMap<Access, BTreeSet<&Domain>> = BTreeMap::new();
        for (domain, rule) in self.domains(&self.allow) {
            named.entry(rule.access()).or_default().insert(domain);
        }
        named
    }

    /// Whether all addresses and ports are denied.
    pub fn denies_everything(&self) -> bool {
        let all =
            |it: &Rule| it.to == Target::Everything && it.ports.is_none() && it.protocol.is_none();
        self.deny.iter().any(all)
    }

    /// Is a connection to this address and port permitted? Addresses of the host and of other VMs,
    /// and addresses opened by names, are not considered.
    pub fn permits(&self, address: IpAddr, protocol: u8, port: u16) -> bool {
        let listed = |rules: &[Rule]| rules.iter().any(|it| it.covers(address, protocol, port));
        listed(&self.allow) || !(listed(&self.deny) || closed().any(|it| it.contains(address)))
    }

    /// Is a connection to this port of the host itself permitted?
    pub fn permits_host(&self, protocol: u8, port: u16) -> bool {
        let covers = |it: &Rule| it.to == Target::Host && it.access().covers(protocol, port);
        self.allow.iter().any(covers)
    }

    fn domains<'a>(&self, rules: &'a [Rule]) -> impl Iterator<Item = (&'a Domain, &'a Rule)> {
        rules.iter().filter_map(|it| match &it.to {
            Target::Domain(domain) => Some((domain, it)),
            _ => None,
        })
    }
}

/// IPv4 ranges that are denied by default: this network, private (RFC 1918), carrier-grade NAT (RFC
/// 6598), loopback, link-local with the clouds' metadata services, special-purpose (RFC 6890),
/// benchmarks (RFC 2544), multicast, reserved, broadcast; and 168.63.129.16, Azure's metadata
/// service.
const CLOSED4: [([u8; 4], u8); 12] = [
    ([0, 0, 0, 0], 8),
    ([10, 0, 0, 0], 8),
    ([100, 64, 0, 0], 10),
    ([127, 0, 0, 0], 8),
    ([168, 63, 129, 16], 32),
    ([169, 254, 0, 0], 16),
    ([172, 16, 0, 0], 12),
    ([192, 0, 0, 0], 24),
    ([192, 168, 0, 0], 16),
    ([198, 18, 0, 0], 15),
    ([224, 0, 0, 0], 4),
    ([240, 0, 0, 0], 4),
];
/// IPv6 ranges that are denied by default: everything but global unicast (RFC 4291 §2.4), and 6to4
/// addresses (RFC 3056), whose embedded IPv4 address may be a private one.
const CLOSED6: [(u16, u8); 4] = [(0, 3), (0x2002, 16), (0x4000, 2), (0x8000, 1)];

/// The ranges that are denied by default, sorted.
pub fn closed() -> impl Iterator<Item = Cidr> {
    let v4 = CLOSED4
        .iter()
        .map(|(first, prefix)| (IpAddr::from(*first), *prefix));
    let v6 = CLOSED6.iter().map(|(first, prefix)| {
        let first = Ipv6Addr::new(*first, 0, 0, 0, 0, 0, 0, 0);
        (IpAddr::V6(first), *prefix)
    });
    v4.chain(v6)
        .filter_map(|(first, prefix)| Cidr::new(first, prefix))
}

/// May a name server's answer open this address? The owner of a name chooses its addresses freely,
/// so only public addresses are opened.
pub fn opened_by_name(address: IpAddr) -> bool {
    !closed().any(|it| it.contains(address)) && address != IpAddr::V4(Ipv4Addr::BROADCAST)
}
