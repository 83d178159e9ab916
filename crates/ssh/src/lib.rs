//! SSH to VMs whose images need no SSH server.
//!
//! `jiffy-ssh`, which `jiffy` executes for its SSH verbs:
//!
//! * [`client`]: `jiffy ssh` starts the OpenSSH client.
//! * [`config`]: the options with which that client reaches VMs, and `jiffy ssh-config`.
//! * [`keys`]: the user's key, and a host key for each VM.
//! * [`proxy`]: `jiffy ssh-proxy` serves SSH on stdin and stdout; the programs of a session run
//!   through the node's API, as those of `jiffy exec` do.
//!
//! The proxy copies `jiffy-ssh-guest` into a VM for everything that the API does not offer.

pub mod client;
pub mod config;
pub mod keys;
pub mod proxy;
