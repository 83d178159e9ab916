//! The network device (Virtio 1.3 §5.1).
//!
//! * [`device`]: the virtio device: its life, its queues, its threads.
//! * [`options`]: what it is made from; [`error`]: why it can't be made.
//! * [`mac`]: addresses of interfaces.
//! * [`backend`]: where frames go and come from: a TAP interface, passt, nowhere.
//! * [`counters`]: what went through it and what did not.
//! * [`state`]: what a snapshot keeps.
//! * `config`: the configuration space, and the link behind it.
//! * [`header`]: the header before each frame, checked.
//! * `vectors`: runs of guest memory that the host's kernel reads and writes.
//! * `transmit`, `receive`, `control`: what is done on the three kinds of queue.
//! * `worker`: the thread that serves a pair of queues.
//!
//! A frame that the guest sends bears the device's MAC address as its source, or is
//! dropped: a clone's memory may hold frames of the VM it was made from.

pub mod backend;
mod config;
mod control;
pub mod counters;
pub mod device;
pub mod error;
pub mod header;
pub mod mac;
pub mod options;
mod receive;
pub mod state;
mod transmit;
mod vectors;
mod worker;

#[cfg(test)]
mod tests;

pub use backend::Backend;
pub use counters::{Counters, Totals};
pub use device::Net;
pub use error::NetError;
pub use mac::Mac;
pub use options::NetArgs;
pub use state::{NetState, RestoreError};

/// Entries of a receive and of a transmit queue. Linux fills the whole receive queue
/// with buffers of 1.5 KiB when the interface comes up.
pub const QUEUE_SIZE: u16 = 256;
/// Entries of the control queue: a command takes up to four.
pub const CONTROL_QUEUE_SIZE: u16 = 16;
/// Most pairs of queues.
pub const PAIRS_MAX: u16 = 8;

/// Bytes of an Ethernet header.
const ETHERNET: usize = 14;
/// Longest frame: 65,535 bytes of packet, an Ethernet header, and a VLAN tag.
const FRAME_MAX: usize = 65_535 + ETHERNET + 4;
/// Frames on a queue before the other direction has its turn.
const TURN: usize = 64;
