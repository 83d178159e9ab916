//! `jiffy`, the command line: parses, calls the node's API, renders. No VM
//! logic lives here.
//!
//! * [`args`]: verbs and options.
//! * [`verbs`]: one file per verb.
//! * [`place`]: finding the node: on this host or in the machine.
//! * [`client`]: the node's HTTP API, plain and upgraded to frames.
//! * [`session`]: connects this terminal to a command in a VM.
//! * [`copy`]: trees of files to and from a VM.
//! * [`doctor`]: what this host offers.
//! * [`timeline`]: timelines as tables, JSON, trace events and chains.
//! * [`render`]: tables, sizes, ages, and guest text made harmless.
//! * [`failure`]: errors as users read them, and exit statuses.

mod args;
mod client;
mod copy;
mod cpu;
mod doctor;
mod failure;
mod place;
mod render;
mod session;
#[cfg(feature = "testing")]
pub mod testing;
mod timeline;
mod verbs;

pub use verbs::main;
