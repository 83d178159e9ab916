//! The host's side of VMs' network.
//!
//! * [`host`]: opens, reconciles and changes the whole network.
//! * [`identity`]: link name and MAC address of a VM id.
//! * [`cidr`]: ranges of addresses.
//! * [`pool`]: assigns addresses to VMs.
//! * [`policy`]: what a VM may reach, and its published ports.
//! * [`inbound`]: connections to published ports of hibernated VMs.
//! * [`links`]: TAPs, routes, neighbours.
//! * [`rules`]: the nftables table of all VMs.
//! * [`names`]: the name server of VMs.
//! * [`firewalls`]: detects other firewalls of this host.
//! * [`conntrack`]: lists and deletes tracked connections.
//! * [`traces`]: counts what the kernel has for VMs.
//! * [`nft`]: the netlink protocol of nftables.
//! * [`netlink`]: netlink sockets and messages.
//!
//! docs/network.md describes the whole design.

pub mod cidr;
mod conntrack;
mod error;
pub mod firewalls;
pub mod host;
pub mod identity;
pub mod inbound;
pub mod links;
pub mod names;
mod netlink;
mod nft;
pub mod policy;
pub mod pool;
pub mod rules;
mod sysctl;
pub mod traces;

pub use cidr::Cidr;
pub use error::Error;
pub use identity::VmId;
pub use netlink::Refusal;
