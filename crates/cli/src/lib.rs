//! `jiffy`, the command line: parses arguments, calls the node's API, and prints results. It has no
//! VM logic. The program `jiffy-ssh`, which performs the verbs of SSH, uses its parts.
//!
//! * [`args`]: verbs and options.
//! * [`verbs`]: one file per verb.
//! * [`place`]: finds the node, on this host or in the machine.
//! * [`client`]: the node's HTTP API, plain and upgraded to frames.
//! * [`session`]: connects this terminal to a command in a VM.
//! * [`copy`]: copies trees of files to and from a VM.
//! * [`doctor`]: checks what this host offers.
//! * [`timeline`]: timelines as tables, JSON, trace events and chains.
//! * [`render`]: tables, sizes, ages, and escaping of guest text.
//! * [`failure`]: errors for users, and exit statuses.

mod args;
pub mod client;
mod copy;
mod cpu;
mod doctor;
pub mod failure;
pub mod place;
mod render;
mod session;
#[cfg(feature = "testing")]
pub mod testing;
mod timeline;
mod verbs;

pub use args::queue::WaitTime;
pub use args::ssh;
pub use verbs::{Context, SshVerb, main, show, ssh_main};
