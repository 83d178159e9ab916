//! Virtio devices (Virtio 1.3) and what they share.
//!
//! * [`device`]: the contract between device, transport and VMM.
//! * [`mmio`]: the transport.
//! * [`signal`]: when to interrupt the driver.
//! * [`block`]: disks, raw files or block devices.
//! * [`balloon`]: memory given back to the host.
//! * [`entropy`]: random numbers.
//! * [`vsock`]: streams between guest and host.

pub mod balloon;
pub mod block;
pub mod device;
pub mod entropy;
#[cfg(test)]
mod flood_tests;
pub mod mmio;
pub mod signal;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod vsock;
