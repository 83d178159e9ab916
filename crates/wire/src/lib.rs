//! Protocols between Jiffy's processes: messages, versions, framing, and the spans of a
//! timeline. No I/O.
//!
//! * [`frame`]: length-prefixed frames on a byte stream, of limited length.
//! * [`lines`]: lines on a byte stream, of limited length.
//! * [`mac`]: MAC addresses.
//! * [`guest`]: the configuration that a guest reads from fw_cfg.
//! * [`agent`]: the protocol between the node and `jiffy-init`, over vsock.
//! * [`vmm`]: configuration and control messages of `jiffy-vmm`.
//! * [`pager`]: the protocols between VMM, node and `jiffy-pager`.
//! * [`sched`]: messages between the node and `jiffy-sched`.
//! * [`disk`]: disks that are filled on demand.
//! * [`files`]: messages between a VM's virtio-fs device and the server of its folder.
//! * [`import`]: messages between the node and `jiffy-import`.
//! * [`cpu`]: CPU profiles of guests and hosts, and their comparison.
//! * [`api`]: the node's HTTP API.
//! * [`signal`]: names of signals.
//! * [`text`]: lists, sizes and ages for people.
//! * [`state`]: the envelope of a VM's saved state.
//! * [`timeline`]: named spans on one monotonic clock.
//! * [`trace`]: marks that a guest writes to the trace port.

#![cfg_attr(not(feature = "std"), no_std)]

extern crate alloc;

pub mod agent;
#[cfg(feature = "std")]
pub mod api;
#[cfg(feature = "std")]
pub mod cpu;
#[cfg(feature = "std")]
pub mod disk;
#[cfg(feature = "std")]
pub mod files;
pub mod frame;
pub mod guest;
#[cfg(feature = "std")]
pub mod import;
pub mod lines;
pub mod mac;
#[cfg(feature = "std")]
pub mod pager;
#[cfg(feature = "std")]
pub mod sched;
pub mod signal;
#[cfg(feature = "std")]
pub mod state;
#[cfg(feature = "std")]
pub mod text;
#[cfg(feature = "std")]
pub mod timeline;
pub mod trace;
#[cfg(test)]
mod transcripts;
#[cfg(feature = "std")]
pub mod vmm;
