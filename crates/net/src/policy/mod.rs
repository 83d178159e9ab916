//! What a VM may reach, and which of its ports can be reached from elsewhere.
//!
//! What is allowed beats what is denied, and what is denied beats what holds for every VM:
//! the host itself, other VMs, private, link-local and metadata addresses: no; the rest: yes.
//!
//! * [`target`]: whom a rule is about, and how it is written.
//! * [`publish`]: ports of the host's that lead to a VM.
//! * [`hold`]: sockets that keep those ports from other programs.

pub mod hold;
pub mod publish;
pub mod target;

#[cfg(test)]
mod tests;

use crate::Cidr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
pub use target::{Domain, Protocol, Rule, To};

/// The most rules of one VM: each is a rule of the kernel's that packets pass one by one.
pub const RULES: usize = 256;

/// What one VM may reach beside, or not of, what all VMs may.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Policy {
    /// Reached whatever else is said.
    pub allow: Vec<Rule>,
    /// Not reached, unless allowed.
    pub deny: Vec<Rule>,
}

impl Policy {
    /// Is it what holds for every VM?
    pub fn is_default(&self) -> bool {
        self.allow.is_empty() && self.deny.is_empty()
    }

    /// Is there a rule about names?
    pub fn has_domains(&self) -> bool {
        self.domains(&self.allow).next().is_some() || self.domains(&self.deny).next().is_some()
    }

    /// Does a name resolve? `name` has neither capital letters nor a dot at its end.
    ///
    /// One that is allowed does. One that is denied does not, and where everything is denied
    /// no other does.
    pub fn resolves(&self, name: &str) -> bool {
        let listed = |rules| self.domains(rules).any(|(it, _)| it.covers(name));
        listed(&self.allow) || !(listed(&self.deny) || self.denies_everything())
    }

    /// Are the addresses of a name reached because of the name?
    pub fn opens(&self, name: &str) -> bool {
        self.domains(&self.allow).any(|(it, _)| it.covers(name))
    }

    /// Is it denied to reach anything at all, at any port?
    pub fn denies_everything(&self) -> bool {
        let all =
            |it: &Rule| it.to == To::Everything && it.ports.is_none() && it.protocol.is_none();
        self.deny.iter().any(all)
    }

    /// May a connection to this address and port, beyond the host and other VMs, be made? What
    /// is open because of a name is not asked here.
    pub fn permits(&self, address: IpAddr, protocol: u8, port: u16) -> bool {
        let listed = |rules: &[Rule]| rules.iter().any(|it| it.covers(address, protocol, port));
        listed(&self.allow) || !(listed(&self.deny) || closed().any(|it| it.contains(address)))
    }

    fn domains<'a>(&self, rules: &'a [Rule]) -> impl Iterator<Item = (&'a Domain, &'a Rule)> {
        rules.iter().filter_map(|it| match &it.to {
            To::Domain(domain) => Some((domain, it)),
            _ => None,
        })
    }
}

/// What no VM reaches unless a rule says so: this network, private (RFC 1918), carriers'
/// (RFC 6598), loopback, link-local with clouds' metadata, special (RFC 6890), benchmarks
/// (RFC 2544), multicast, reserved, broadcast; and 168.63.129.16, which is Azure's metadata.
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
/// All that is not global unicast (RFC 4291 §2.4), and addresses that have one of IPv4 in them
/// (6to4, RFC 3056), which may be a private one.
const CLOSED6: [(u16, u8); 4] = [(0, 3), (0x2002, 16), (0x4000, 2), (0x8000, 1)];

/// The ranges that no VM reaches unless a rule says so, in order.
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

/// May an answer of a name server open this address? A name could be made to lead anywhere,
/// so it opens public addresses only.
pub fn opened_by_name(address: IpAddr) -> bool {
    !closed().any(|it| it.contains(address)) && address != IpAddr::V4(Ipv4Addr::BROADCAST)
}
