//! What can be asked of a node: the use cases, whoever asks. No HTTP, no file formats.
//!
//! * [`node`](Node): the use cases.
//! * [`spec`]: checks what a VM is to be.
//! * `golden`: snapshots that the node makes by itself, and standbys made from them.
//! * `cpu`: what of this host's processor guests can have.

mod cpu;
mod golden;
mod node;
pub mod spec;

pub use node::{Config, Node, to_the_end};
