//! What can go wrong.

use crate::netlink::Refusal;
use std::io;
use std::net::Ipv4Addr;

/// Why the network could not be set up or changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A VM's id that is none.
    #[error("`{0}` is no VM's id: those are 12 hexadecimal digits")]
    Id(String),
    /// A range of addresses that is none.
    #[error(
        "`{0}` is no range of addresses: write ADDRESS or ADDRESS/PREFIX, with no bit after the prefix"
    )]
    Cidr(String),
    /// A rule that is none.
    #[error("`{0}` is no rule: {1}")]
    Rule(String, &'static str),
    /// Ports that can't be published so.
    #[error("`{0}` can't be published: {1}")]
    Publish(String, &'static str),
    /// A range that VMs can't have their addresses of.
    #[error("VMs can't have addresses of {0}: {1}")]
    Pool(String, &'static str),
    /// All addresses are in use.
    #[error("all addresses of {0} are in use")]
    PoolEmpty(String),
    /// Every private range has a route.
    #[error("the host has routes into all private ranges: choose one for VMs by hand")]
    NoRange,
    /// An address that the host itself or another network has.
    #[error("the range {pool} for VMs overlaps the host's route to {route}")]
    PoolTaken {
        /// The VMs' range.
        pool: String,
        /// What is there.
        route: String,
    },
    /// The process may not change the host's network.
    #[error("changing the host's network needs CAP_NET_ADMIN")]
    Permission,
    /// No TAP device could be made.
    #[error("the link {name} can't be made")]
    Tap {
        /// Its name.
        name: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The kernel refused something.
    #[error("{what} failed")]
    Kernel {
        /// What was asked of it.
        what: &'static str,
        /// What it says.
        #[source]
        source: Refusal,
    },
    /// A file of /proc/sys could not be read or written.
    #[error("{path} can't be set")]
    Sysctl {
        /// The file.
        path: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A VM that is not attached.
    #[error("the VM {0} has no network")]
    NotAttached(String),
    /// A VM that is attached already, or an address that another has.
    #[error("the address {0} belongs to another VM")]
    AddressTaken(Ipv4Addr),
    /// A port of the host's that can't lead to a VM.
    #[error("{0} can't be published: {1}")]
    Port(String, &'static str),
    /// VMs have no IPv6.
    #[error("{0} can't be published: VMs have no IPv6 on this host")]
    PortWithoutIpv6(String),
    /// Another node's daemon.
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
