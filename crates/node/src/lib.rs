//! The use cases of a node, independent of HTTP and of file formats.
//!
//! * [`node`](Node): the use cases.
//! * [`spec`]: checks requests for VMs.
//! * `golden`: snapshots that the node makes automatically, and standbys made from them.
//! * `idle`: decides when a VM is idle.
//! * `pressure`: detects that the host's memory gets short, and decides what to do.
//! * `cpu`: the features of this host's processor that guests can have.

mod cpu;
mod golden;
mod idle;
mod node;
mod pressure;
pub mod spec;

pub use node::{Caller, Config, Node, on_behalf_of, run_to_completion};
