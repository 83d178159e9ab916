//! Finds other firewalls of this host whose rules drop VMs' packets, and suggests what to do.
//!
//! A packet must be accepted by every table: one that ours accepts may still be dropped by another.
//! Other firewalls' rules are never changed; the operator is told.

use crate::Error;
use crate::links;
use crate::netlink::Channel;
use crate::nft::read::{self, FoundChain};
use crate::rules::TABLE;
use std::fmt;

/// Families, as nft(8) calls them.
const FAMILIES: [(u8, &str); 3] = [(1, "inet"), (2, "ip"), (10, "ip6")];

/// A chain of another firewall whose default is to drop packets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blocker {
    /// Family, table and chain, as nft(8) writes them.
    pub chain: String,
    /// The firewall that the chain seems to belong to.
    pub owner: Owner,
}

/// The program that made the rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// Docker, which has the chain DOCKER-USER for users' rules.
    Docker,
    /// ufw.
    Ufw,
    /// firewalld.
    Firewalld,
    /// Another program.
    Unknown,
}

impl Blocker {
    /// What the operator can do.
    pub fn remedy(&self) -> String {
        let prefix = crate::identity::LINK_PREFIX;
        match self.owner {
            Owner::Docker => format!(
                "iptables -I DOCKER-USER -i {prefix}+ -j ACCEPT; \
                 iptables -I DOCKER-USER -o {prefix}+ -j ACCEPT"
            ),
            Owner::Ufw => format!(
                "ufw route allow in on {prefix}+; ufw route allow out on {prefix}+; \
                 ufw allow in on {prefix}+ to any port 53"
            ),
            Owner::Firewalld => "firewall-cmd --permanent --zone=trusted --add-source=RANGE, \
                 for both of VMs' ranges; firewall-cmd --reload"
                .to_owned(),
            Owner::Unknown => format!(
                "accept packets there whose link's name begins with {prefix} \
                 (nft: iifgroup or oifgroup {:#x})",
                links::GROUP
            ),
        }
    }
}

impl fmt::Display for Blocker {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(
            f,
            "{} drops packets from and to VMs; {}",
            self.chain,
            self.remedy()
        )
    }
}

/// The chains that may drop VMs' packets. Rules of `iptables-legacy` are not included: they can't
/// be listed with netlink.
pub(crate) fn find(netfilter: &mut Channel) -> Result<Vec<Blocker>, Error> {
    let chains = read::chains(netfilter).map_err(Error::kernel("listing other firewalls"))?;
    Ok(blockers(&chains))
}

fn blockers(chains: &[FoundChain]) -> Vec<Blocker> {
    let theirs = |it: &&FoundChain| !(it.family == 1 && it.table == TABLE);
    let has = |family, table: &str, begins: &str| {
        chains
            .iter()
            .any(|it| it.family == family && it.table == table && it.name.starts_with(begins))
    };
    // firewalld's chain has the policy `accept`, but ends with a rule that rejects everything.
    let drops = |it: &&FoundChain| {
        it.drops_forwarded || (it.table == "firewalld" && it.name == "filter_FORWARD")
    };
    let all = chains.iter().filter(theirs).filter(drops);
    all.filter_map(|it| {
        let (_, family) = FAMILIES.iter().find(|(number, _)| *number == it.family)?;
        let owner = if it.table == "firewalld" {
            Owner::Firewalld
        } else if has(it.family, &it.table, "DOCKER-USER") {
            Owner::Docker
        } else if has(it.family, &it.table, "ufw") {
            Owner::Ufw
        } else {
            Owner::Unknown
        };
        Some(Blocker {
            chain: format!("{family} {} {}", it.table, it.name),
            owner,
        })
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(family: u8, table: &str, name: &str, drops_forwarded: bool) -> FoundChain {
        FoundChain {
            family,
            table: table.to_owned(),
            name: name.to_owned(),
            drops_forwarded,
        }
    }

    #[test]
    fn dropping_firewalls_are_reported_with_a_remedy() {
        let found = blockers(&[
            chain(2, "filter", "FORWARD", true),
            chain(2, "filter", "DOCKER-USER", false),
            chain(10, "filter", "FORWARD", true),
            chain(10, "filter", "ufw6-before-forward", false),
            chain(1, "firewalld", "filter_FORWARD", false),
            chain(1, "jiffy", "forward", true),
            chain(1, "mine", "fwd", true),
            chain(1, "mine", "in", false),
        ]);
        let found: Vec<_> = found
            .iter()
            .map(|it| (it.chain.as_str(), it.owner))
            .collect();
        assert_eq!(
            found,
            [
                ("ip filter FORWARD", Owner::Docker),
                ("ip6 filter FORWARD", Owner::Ufw),
                ("inet firewalld filter_FORWARD", Owner::Firewalld),
                ("inet mine fwd", Owner::Unknown),
            ]
        );
    }
}
