//! The block device (Virtio 1.3 §5.2) over a raw file or a block device.
//!
//! * [`device`]: the virtio device and its queue.
//! * [`backend`]: a disk without a transport, for other servers as well.
//! * [`options`]: the options of a disk, and its errors.
//! * [`residency`]: disks whose file is filled on demand.
//! * [`state`]: what a snapshot keeps of a disk.
//! * `config`: the configuration space.
//! * `request`: reads requests from guest memory and checks them.
//! * [`executor`]: executes requests.
//! * `worker`: the thread that serves the queue.
//! * `on_demand`: reads that wait for bytes that are missing in the file.
//! * `disk`: transfers between the file and guest memory, a piece at a time.

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

/// Bytes of the protocol's unit (Virtio 1.3 §5.2.4).
pub const SECTOR: u64 = 512;

/// Entries of the queue. The worker executes one request after the other, so more entries would
/// gain nothing (as many can wait for missing bytes), and a Linux guest allocates a request for
/// every entry when it boots.
const QUEUE_SIZE: u16 = 128;

/// Most data buffers of a request: a queue's worth, less header and status.
const SEGMENTS_MAX: usize = QUEUE_SIZE as usize - 2;

/// Most ranges in one discard or write-zeroes request.
const RANGES_MAX: usize = 16;

/// Most sectors of a range to discard: 2 GiB less one sector, which fits into any 32-bit count of
/// bytes.
const DISCARD_SECTORS_MAX: u32 = (1 << 22) - 1;

/// Most sectors of a range to zero, 32 MiB: some file systems can't zero a range without writing
/// it.
const WRITE_ZEROES_SECTORS_MAX: u32 = 1 << 16;
