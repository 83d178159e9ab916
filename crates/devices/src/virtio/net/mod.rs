//! The network device (Virtio 1.3 §5.1).
//!
//! * [`device`]: the virtio device with its queues and threads.
//! * [`options`]: the options of a device; [`error`]: its errors.
//! * [`mac`]: MAC addresses.
//! * [`backend`]: sends and receives frames: a TAP interface, passt, or none.
//! * [`counters`]: counters of traffic.
//! * [`state`]: what a snapshot keeps of a device.
//! * [`guard`]: which packets a guest may send, where the host has no rules for it.
//! * `config`: the configuration space and the link's state.
//! * [`header`]: checks the header of each frame.
//! * `frame`: frames in guest memory, as backends read and write them.
//! * `transmit`, `receive`, `control`: serve the three kinds of queue.
//! * `worker`: the thread that serves a pair of queues.
//!
//! The guest's frames must have the device's MAC address as their source, and are dropped
//! otherwise: a clone's memory may hold frames of the VM it was made from.

pub mod backend;
mod config;
mod control;
pub mod counters;
pub mod device;
pub mod error;
mod frame;
pub mod guard;
pub mod header;
pub mod mac;
pub mod options;
mod receive;
pub mod state;
mod transmit;
mod worker;

#[cfg(test)]
mod tests;

pub use backend::Backend;
pub use counters::{Counters, Totals};
pub use device::Net;
pub use error::NetError;
pub use guard::Guard;
pub use mac::Mac;
pub use options::NetArgs;
pub use state::{NetState, RestoreError};

/// Entries of a receive queue. Linux fills all of it with buffers of 1.5 KiB when the interface is set
/// up. In a stream they are pages; half of them would be used up by frames of a MiB, and the guest be
/// interrupted twice as often.
pub const RECEIVE_QUEUE_SIZE: u16 = 512;
/// Entries of a transmit queue.
pub const TRANSMIT_QUEUE_SIZE: u16 = 256;
/// Entries of the control queue: a command takes up to four.
pub const CONTROL_QUEUE_SIZE: u16 = 16;
/// Most pairs of queues.
pub const PAIRS_MAX: u16 = 8;

/// Bytes of an Ethernet header.
const ETHERNET: usize = 14;
/// Longest frame: 65,535 bytes of packet, an Ethernet header, and a VLAN tag.
const FRAME_MAX: usize = 65_535 + ETHERNET + 4;
/// Most frames of one queue before the other direction is served.
const FRAMES_PER_TURN: usize = 64;
