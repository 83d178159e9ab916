//! `jiffy-init`: the guest's PID 1 and agent, in one program without std.
//!
//! * [`boot`]: mounts, root, disks, network and identity, set up once.
//! * [`agent`]: the event loop: connections of the host, processes, shutdown.
//! * [`supervisor`]: the channel to the node, and the first command.
//! * [`program`]: starts programs and handles their streams.
//! * [`freezer`], [`gate`]: freezes programs for a capture; gives a restored guest its new identity
//!   before they are thawed.
//! * [`fw_cfg`]: the host's files for this guest.
//! * [`service`]: long-running programs.
//! * [`start`](mod@start): the main function.
//! * [`syscalls`]: system calls, with all unsafe code.
#![no_std]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod agent;
pub mod boot;
pub mod console;
pub mod files;
pub mod freezer;
pub mod fw_cfg;
pub mod gate;
pub mod kmsg;
pub mod poll;
pub mod power;
pub mod program;
pub mod report;
pub mod service;
mod start;
pub mod stream;
pub mod supervisor;
pub mod syscalls;
pub mod trace;

pub use start::{emergency, start};
