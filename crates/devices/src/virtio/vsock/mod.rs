//! The socket device (Virtio 1.3 §5.10): streams between the guest and
//! programs on the host, over Unix sockets.
//!
//! A guest that connects to port N of the host (context id 2) reaches the Unix
//! socket `<path>_N`. A host program that connects to `<path>` and sends
//! `CONNECT N\n` reaches port N of the guest; the device answers `OK <port>\n`
//! once the guest has accepted, and closes the socket if it has not.
//!
//! * [`device`]: the virtio device and its configuration space.
//! * [`state`]: what a snapshot keeps of a device.
//! * `error`: errors of a device.
//! * `engine`: one turn of work, which the worker thread repeats.
//! * `rings`: the three virtqueues.
//! * `packet`: headers, and payloads in guest memory.
//! * `muxer`: all connections, and the order in which they send.
//! * `connection`, `credit`, `outbox`: one connection.
//! * `listener`, `handshake`: host programs that connect.
//! * `tokens`, `deadlines`: the events and times that the engine waits for.
//!
//! Memory is bounded whatever the guest does: at most [`CONNECTION_LIMIT`] connections, each with
//! at most [`BUFFER`] bytes that its host program has not read yet.

mod connection;
mod credit;
mod deadlines;
pub mod device;
mod engine;
mod error;
mod handshake;
mod listener;
mod muxer;
mod outbox;
mod packet;
mod rings;
pub mod state;

#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;
mod tokens;

pub use device::{Vsock, VsockArgs};
pub use error::VsockError;
pub use state::{SavedConnection, VsockState};

/// Most connections at once, including those in a handshake or draining.
pub const CONNECTION_LIMIT: usize = 1023;

/// Bytes that the guest may send on one connection beyond what its host
/// program has read (`buf_alloc`, Virtio 1.3 §5.10.6.3).
pub const BUFFER: u32 = 128 * 1024;
