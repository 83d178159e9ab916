//! The block device (Virtio 1.3 §5.2) over a raw file or a block device.
//!
//! * [`device`]: the virtio device: its life and its one queue.
//! * [`backend`]: a disk without a transport, for other servers of it too.
//! * [`options`]: which file, and how; what can be wrong with it.
//! * [`residency`]: disks whose file is filled as it is read.
//! * [`state`]: what a snapshot keeps.
//! * `config`: the configuration space.
//! * `request`: requests as guest memory has them, checked.
//! * [`executor`]: carries requests out.
//! * `worker`: the thread that serves the queue.
//! * `on_demand`: reads that wait for bytes which are not in the file yet.
//! * `disk`: bytes of the file to and from guest memory, a piece at a time.

pub mod backend;
mod config;
pub mod device;
mod disk;
pub mod executor;
mod on_demand;
pub mod options;
mod request;
pub mod residency;
pub mod state;
mod worker;

#[cfg(test)]
mod tests;

pub use backend::Backend;
pub use device::Block;
pub use executor::{Executor, Outcome};
pub use options::{BlockError, BlockOptions, ID_BYTES};
pub use residency::{Fetched, Fetcher, Residency};
pub use state::{BlockState, RestoreError};

/// Bytes of the unit in which the protocol counts (Virtio 1.3 §5.2.4).
pub const SECTOR: u64 = 512;

/// Entries of the queue. The worker carries out one request after the other, so more buy
/// nothing (as many can wait for missing bytes), and a Linux guest allocates a request for
/// every entry when it boots.
const QUEUE_SIZE: u16 = 128;

/// Most buffers of data in one request: a queue's worth, less header and
/// status.
const SEGMENTS_MAX: usize = QUEUE_SIZE as usize - 2;

/// Most ranges in one discard or write-zeroes request.
const RANGES_MAX: usize = 16;

/// Most sectors a range to discard may have: 2 GiB less one, what fits below
/// any 32-bit count of bytes.
const DISCARD_SECTORS_MAX: u32 = (1 << 22) - 1;

/// Most sectors a range to zero may have, 32 MiB: a file system that can't
/// zero a range by itself has to write it.
const WRITE_ZEROES_SECTORS_MAX: u32 = 1 << 16;
