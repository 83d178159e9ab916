//! Virtio devices (Virtio 1.3) and what they share.
//!
//! * [`device`]: the contract between device, transport and VMM.
//! * [`mmio`]: the transport.

pub mod device;
pub mod mmio;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
