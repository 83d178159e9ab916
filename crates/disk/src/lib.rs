//! `jiffy-disk`: serves a disk to other monitors over vhost-user, with the same code that serves
//! Jiffy's own VMs.
//!
//! One monitor is served at a time, each by a process of its own: whatever a monitor sends, or
//! writes to the memory it shares, can only end that process.
//!
//! * [`confinement`]: the sandboxes of both processes.
//! * [`options`]: the command line.
//! * [`server`]: the listening socket, and a process for each monitor.
//! * [`device`]: the disk as a vhost-user backend.
//!
//! Source: QEMU, docs/interop/vhost-user.rst.

pub mod confinement;
pub mod device;
pub mod options;
pub mod server;
