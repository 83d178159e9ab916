//! Networks, and a VM's part of one.

use crate::vmm::NetLimit;
use serde::{Deserialize, Serialize};

/// Network of a VM, and its policy.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkUse {
    /// `none`, `default`, or a user-defined network; VMs of a user-defined network reach each
    /// other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Published ports: `[ADDRESS:]HOST[-HOST]:GUEST[-GUEST][/udp]`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<String>,
    /// Publish all ports that its image exposes, each at a free port of the host.
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    pub publish_all: bool,
    /// What it may reach.
    #[serde(default, skip_serializing_if = "NetworkPolicy::is_default")]
    pub policy: NetworkPolicy,
    /// Name servers instead of the node's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dns: Vec<String>,
    /// Search domains, tried before the node's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub search: Vec<String>,
    /// Further lines of its /etc/hosts: `NAME:ADDRESS`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<String>,
    /// TCP ports that the node's proxy may reach, each `PORT` or `FROM-TO`; `None`: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proxy_ports: Option<Vec<String>>,
    /// Rate limit in each direction.
    #[serde(default, skip_serializing_if = "NetLimit::is_none")]
    pub limit: NetLimit,
}

impl NetworkUse {
    /// Whether everything has its default.
    pub fn is_default(&self) -> bool {
        *self == NetworkUse::default()
    }
}

/// Changes to what all VMs may reach: `TARGET[:PORT[-PORT]][/tcp|/udp]`, where TARGET is `all`,
/// `host`, an address, a range, a name or `*.NAME`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkPolicy {
    /// Reachable, whatever the other rules say.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allow: Vec<String>,
    /// Not reachable, unless allowed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub deny: Vec<String>,
}

impl NetworkPolicy {
    /// Whether the rules of all VMs apply unchanged.
    pub fn is_default(&self) -> bool {
        *self == NetworkPolicy::default()
    }
}

/// Network of a VM in answers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmNetwork {
    /// `default`, or a user-defined network.
    pub name: String,
    /// Its MAC address, while it is on the network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// Its addresses, IPv4 first; none while it is not on the network, or by passt.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<String>,
    /// Published ports of the host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<String>,
    /// Changes to what all VMs may reach.
    #[serde(default, skip_serializing_if = "NetworkPolicy::is_default")]
    pub policy: NetworkPolicy,
    /// TCP ports that the node's proxy may reach; `None`: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proxy_ports: Option<Vec<String>>,
    /// Counters of its link; only in `inspect`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub counters: Option<NetworkCounters>,
}

/// Counters of a VM's link since it was created.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkCounters {
    /// Packets that the VM sent.
    pub sent_packets: u64,
    /// Bytes of these packets.
    pub sent_bytes: u64,
    /// Packets that the VM received.
    pub received_packets: u64,
    /// Bytes of these packets.
    pub received_bytes: u64,
    /// Packets that it sent with another source address and that were dropped.
    pub spoofed: u64,
    /// Packets to destinations that its policy refuses.
    pub refused: u64,
    /// Packets beyond the VM's limits of new connections, queries and neighbours.
    #[serde(default)]
    pub limited: u64,
}

/// A network of the node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    /// Its name.
    pub name: String,
    /// Address ranges of its VMs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranges: Vec<String>,
    /// Names of its VMs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vms: Vec<String>,
    /// Why its VMs have no link, as one sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// How its VMs have a network, if not by links and rules of the host, as one sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// Other firewalls of the host that drop VMs' packets now, and what helps: a sentence for each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}
