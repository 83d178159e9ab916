//! The virtio-mmio transport, modern (version 2) only: Virtio 1.3 §4.2.
//!
//! * [`registers`]: the layout of a device's window.
//! * [`transport`]: the state machine between driver and device.
//! * [`queue`]: a queue's registers, as the driver wrote them.
//! * [`interrupt`]: InterruptStatus and the interrupt line.
//! * [`state`]: what a snapshot keeps of a transport.

pub mod interrupt;
pub mod queue;
pub mod registers;
pub mod state;
pub mod transport;

#[cfg(test)]
mod tests;

pub use interrupt::MmioInterrupt;
pub use registers::WINDOW_BYTES;
pub use state::{MmioTransportState, QueueState, RestoreError};
pub use transport::{MmioTransport, NotPaused, Wires};
