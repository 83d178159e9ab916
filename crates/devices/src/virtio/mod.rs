//! Virtio devices (Virtio 1.3) and their shared parts.
//!
//! * [`device`]: the interface between device, transport and VMM.
//! * [`mmio`]: the transport.
//! * [`queue`]: chains of descriptors, transfers, interrupts and rate limits, for all devices.
//! * `poll`: waiting for events.
//! * `work`: a device's work on a thread.
//! * [`block`]: disks, raw files or block devices.
//! * [`balloon`]: memory that is released to the host.
//! * [`entropy`]: random numbers.
//! * [`fs`]: folders of the host.
//! * [`net`]: network interfaces.
//! * [`vsock`]: streams between guest and host.

pub mod balloon;
pub mod block;
pub mod device;
pub mod entropy;
#[cfg(test)]
mod flood_tests;
pub mod fs;
pub mod mmio;
pub mod net;
pub(crate) mod poll;
pub mod queue;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod vsock;
pub(crate) mod work;
