//! The host's side of VMs' network.
//!
//! * [`host`]: all of it, behind one door.
//! * [`identity`]: what a VM's id decides: its link's name, its MAC address.
//! * [`cidr`]: ranges of addresses.
//! * [`pool`]: who has which address.
//! * [`policy`]: what a VM may reach, and which of its ports can be reached.
//! * [`inbound`]: connections to VMs that sleep.
//! * [`links`]: TAPs, routes, neighbours.
//! * [`rules`]: the nftables table of all VMs.
//! * [`names`]: the name server of VMs.
//! * [`firewalls`]: other firewalls of this host.
//! * [`conntrack`]: connections that the kernel tracks.
//! * [`nft`]: nftables, as the kernel speaks it.
//! * [`netlink`]: how the kernel is asked.
//!
//! docs/network.md has the whole story.

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

pub use cidr::Cidr;
pub use error::Error;
pub use identity::VmId;
pub use netlink::Refusal;
