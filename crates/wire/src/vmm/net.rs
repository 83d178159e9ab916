//! Network interfaces of a VM, and their limits.

use super::restore::Source;
use crate::mac::Mac;
use serde::{Deserialize, Serialize};
use std::net::Ipv4Addr;
use std::num::NonZeroU64;

/// A network interface of the guest. It has a pair of queues for each descriptor of a TAP
/// interface, otherwise one pair.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Net {
    /// Its MAC address. Frames of the guest with another source address are dropped. A restored
    /// guest must set it ([`crate::guest::Interface::mac`]).
    pub mac: Mac,
    /// Largest packet without Ethernet header, bytes: 68 or more. `None` keeps the driver's default
    /// of 1500.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u16>,
    /// Where its frames go.
    #[serde(default)]
    pub backend: NetBackend,
    /// Which packets the guest may send; `None` leaves that to the host's rules.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guard: Option<Guard>,
    /// Limit on what the guest receives.
    #[serde(default, skip_serializing_if = "NetLimit::is_none")]
    pub receive_limit: NetLimit,
    /// Limit on what the guest sends.
    #[serde(default, skip_serializing_if = "NetLimit::is_none")]
    pub send_limit: NetLimit,
}

/// Which packets a guest may send on a host that has no rules for it: ARP, and IPv4 to open
/// addresses. Loopback, broadcast and groups are always closed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Guard {
    /// Closed destinations: an address, and how many of its bits count.
    #[serde(default)]
    pub closed: Vec<(Ipv4Addr, u8)>,
    /// Closed destinations that are open at port 53.
    #[serde(default)]
    pub name_servers: Vec<Ipv4Addr>,
    /// TCP ports of the guest, each the first and the last of a range, from which it may answer
    /// connections of closed addresses. Datagrams of these may be answered from any port.
    #[serde(default)]
    pub tcp: Vec<(u16, u16)>,
}

/// Limits of a network interface in one direction. After a pause, `burst` or one second's worth
/// passes at once. Segments of a connection that the host passes in one piece count as one packet.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetLimit {
    /// Bytes of frames per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<NonZeroU64>,
    /// Packets per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packets_per_second: Option<NonZeroU64>,
    /// Bytes in a burst.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_burst: Option<NonZeroU64>,
    /// Packets in a burst.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packets_burst: Option<NonZeroU64>,
}

impl NetLimit {
    /// Whether there is no limit.
    pub fn is_none(&self) -> bool {
        *self == NetLimit::default()
    }
}

/// Peer of a network interface.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NetBackend {
    /// None: the link is down.
    #[default]
    None,
    /// Queues of a TAP interface: inherited descriptors, created with `IFF_TAP | IFF_NO_PI |
    /// IFF_VNET_HDR`, and with `IFF_MULTI_QUEUE` if there are several.
    Tap(Vec<i32>),
    /// passt: its Unix socket (`passt --socket`), or a connection to it.
    Passt(Source),
}
