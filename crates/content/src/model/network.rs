//! The node's networks.

use std::collections::BTreeSet;

/// What of the network outlives a daemon.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Networks {
    /// `ADDRESS/PREFIX` that VMs have IPv4 addresses of.
    pub v4: String,
    /// The same of IPv6.
    pub v6: String,
    /// Names of networks that users made.
    pub names: BTreeSet<String>,
}
