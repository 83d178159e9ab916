//! The node's networks.

use std::collections::BTreeSet;

/// The part of the network's state that outlives a daemon.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Networks {
    /// Range of the VMs' IPv4 addresses, `ADDRESS/PREFIX`.
    pub v4: String,
    /// Range of the VMs' IPv6 addresses.
    pub v6: String,
    /// Names of networks that users made.
    pub names: BTreeSet<String>,
}
