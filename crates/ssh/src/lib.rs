//! SSH to VMs, whatever their images have.
//!
//! `jiffy-ssh`, which `jiffy` becomes for its verbs of SSH:
//!
//! * [`client`]: `jiffy ssh` starts the OpenSSH client.
//! * [`config`]: the options with which that client reaches VMs, and `jiffy ssh-config`.
//! * [`keys`]: the user's key, and a host key for each VM.
//! * [`proxy`]: `jiffy ssh-proxy` serves SSH on stdin and stdout; the programs of a session run
//!   through the node's API, as those of `jiffy exec` do.
//!
//! `jiffy-ssh-guest`, which the proxy copies into a VM, does there what the API does not.

pub mod client;
pub mod config;
pub mod keys;
pub mod proxy;
