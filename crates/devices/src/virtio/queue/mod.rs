//! What all virtio devices share between a virtqueue and the host.
//!
//! * [`chain`]: chains of descriptors, read many at a time.
//! * `segment`: checked runs of guest memory, and their host addresses.
//! * `vectored`: transfers between files or sockets and guest memory, without a copy.
//! * `bounce`: transfers of files through an aligned buffer.
//! * `ring`: an active queue: taking and returning chains, interrupts.
//! * [`signal`]: whether the driver wants an interrupt.
//! * `doorbell`: the descriptor that a device's thread sleeps on.
//! * [`limit`]: rate limits.

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
