//! `jiffy-disk`: serves a disk to other monitors over vhost-user, by the same
//! code that serves it to Jiffy's own VMs.
//!
//! One monitor is served at a time. Each gets a process of its own: whatever it
//! sends, or does to the memory it shares, ends that process and no more.
//!
//! * [`options`]: what one may ask for.
//! * [`server`]: the socket, and a process for each monitor.
//! * [`device`]: the disk as vhost-user has it.
//!
//! Source: QEMU, docs/interop/vhost-user.rst.

pub mod device;
pub mod options;
pub mod server;
