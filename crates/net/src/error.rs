//! Errors of the network.

use crate::netlink::Refusal;
use std::io;
use std::net::Ipv4Addr;

/// Why the network could not be set up or changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An invalid VM id.
    #[error("`{0}` is not the id of a VM, which has 12 hexadecimal digits")]
    Id(String),
    /// An invalid range of addresses.
    #[error(
        "`{0}` is not a range of addresses: write ADDRESS or ADDRESS/PREFIX, with zeros after the prefix"
    )]
    Cidr(String),
    /// An invalid rule.
    #[error("`{0}` is not a rule: {1}")]
    Rule(String, &'static str),
    /// Ports that can't be published like this.
    #[error("`{0}` can't be published: {1}")]
    Publish(String, &'static str),
    /// A range that can't be used for VMs' addresses.
    #[error("VMs can't have addresses of {0}: {1}")]
    Pool(String, &'static str),
    /// All addresses are in use.
    #[error("all addresses of {0} are in use")]
    PoolEmpty(String),
    /// Every private range overlaps a route.
    #[error(
        "the host has routes into all private {family} ranges: choose a range for VMs with jiffyd {option}"
    )]
    NoRange {
        /// `IPv4` or `IPv6`.
        family: &'static str,
        /// The option of `jiffyd` that sets the range.
        option: &'static str,
    },
    /// The range overlaps an address or route of the host.
    #[error("the range {pool} for VMs overlaps the host's route to {route}")]
    PoolTaken {
        /// The VMs' range.
        pool: String,
        /// The overlapping address or route.
        route: String,
    },
    /// The process lacks the privilege to change the host's network.
    #[error("changing the host's network needs CAP_NET_ADMIN")]
    Permission,
    /// A TAP device could not be created.
    #[error("the link {name} can't be created")]
    Tap {
        /// Its name.
        name: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The kernel refused a request.
    #[error("{what} failed")]
    Kernel {
        /// The request.
        what: &'static str,
        /// The kernel's answer.
        #[source]
        source: Refusal,
    },
    /// A file of /proc/sys could not be read or written.
    #[error("{path} can't be written")]
    Sysctl {
        /// The file.
        path: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A VM that is not attached.
    #[error("the VM {0} has no network")]
    NotAttached(String),
    /// A VM that is attached already, or an address that another VM has.
    #[error("the address {0} belongs to another VM")]
    AddressTaken(Ipv4Addr),
    /// A port of the host that can't be published.
    #[error("{0} can't be published: {1}")]
    Port(String, &'static str),
    /// VMs have no IPv6.
    #[error("{0} can't be published: VMs have no IPv6 on this host")]
    PortWithoutIpv6(String),
    /// Another node's daemon owns the network.
    #[error("another jiffyd has the network of this host's VMs")]
    OtherNode,
}

impl Error {
    pub(crate) fn kernel(what: &'static str) -> impl FnOnce(Refusal) -> Error {
        move |source| {
            if source.errno() == Some(rustix::io::Errno::PERM) {
                Error::Permission
            } else {
                Error::Kernel { what, source }
            }
        }
    }
}
