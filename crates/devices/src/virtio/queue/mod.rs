//! What all virtio devices share on the way between a virtqueue and the host.
//!
//! * [`chain`]: chains of descriptors, read many at a time.
//! * `segment`: runs of guest memory, and where they are mapped.
//! * `vectored`: file and socket bytes straight to and from guest memory.
//! * `bounce`: file bytes by way of an aligned buffer.
//! * `ring`: a queue in use: taking chains, returning them, interrupts.
//! * [`signal`]: when to interrupt the driver.
//! * `doorbell`: what wakes a device's thread.
//! * [`limit`]: how fast a guest may use a device.

pub(crate) mod bounce;
pub mod chain;
pub(crate) mod doorbell;
pub mod limit;
pub(crate) mod ring;
pub(crate) mod segment;
pub mod signal;
pub(crate) mod vectored;

pub use chain::Chain;
pub use limit::{Cost, RateLimit};
