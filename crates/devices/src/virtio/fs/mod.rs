//! The file system device (Virtio 1.3 §5.11): a folder of the host, served by another process.
//!
//! The guest's requests are messages of FUSE (linux/fuse.h). The device does not interpret them: it
//! passes each to a server over a socket and the answer back to the guest. The server can open files
//! and parses what the guest sends; the process of the device can't.
//!
//! Requests that a server has received are answered before the device stops, so a pause leaves none
//! half done. The server keeps what the guest knows of files and folders; the monitor can ask it for
//! that while the device is paused, and give it to another server, by messages of its own. A device
//! without a server answers ENOTCONN.

mod channel;
mod config;
mod device;
mod error;
mod in_flight;
mod link;
mod request;
mod state;
#[cfg(test)]
mod tests;
mod worker;

pub use config::{TAG_MAX, TagError};
pub use device::{Fs, FsArgs};
pub use error::FsError;
pub use link::ExchangeError;
pub use state::{FsState, RestoreError};

/// Entries of each queue, and most requests that a server has at a time.
const QUEUE_SIZE: u16 = 128;
/// The queue for requests that must not wait behind others, such as FORGET (§5.11.2).
const PRIORITY_QUEUE: u16 = 0;
/// The queue of all other requests.
const REQUEST_QUEUE: u16 = 1;
