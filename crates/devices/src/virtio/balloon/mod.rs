//! The memory balloon (Virtio 1.3 §5.5): takes memory from a guest that has
//! more than it needs, and gives the host what the guest reports free.
//!
//! * [`device`]: the virtio device: its life, its target.
//! * [`reclaim`]: who takes the memory, and how much one notification may
//!   give back.
//! * [`statistics`]: what the guest says of its memory.
//! * [`state`]: what a snapshot keeps.
//! * `account`: what it is made from, and what it keeps between activations.
//! * `config`: the configuration space.
//! * `queues`: the four queues in use.
//! * `request`: page numbers, ranges and statistics as guest memory has them,
//!   checked.
//!
//! It has no thread. A guest that inflates waits for the answer anyway (Linux
//! sends 256 page numbers and sleeps until they are taken), so another thread
//! would save nothing, and every restore would have to start it. Free page
//! reporting comes at most every two seconds, in requests of at most 32 blocks
//! of 2 or 4 MiB (Linux, mm/page_reporting.c): a few milliseconds on the vCPU
//! that runs the report, less than clearing those pages again will cost the
//! guest. [`reclaim::Budget`] bounds what a hostile guest can do with it, and
//! it delays nobody but itself.
//!
//! What the VMM does with it:
//!
//! 1. It implements [`Reclaim`]. `release` runs on the vCPU thread that
//!    notified, or on the one that resumes a paused or restored VM.
//! 2. `Balloon::new(BalloonArgs { ram_bytes, reclaim })`, or
//!    [`Balloon::restore`] with the saved [`BalloonState`], goes behind a
//!    `MmioTransport`, which has no doorbells to register.
//! 3. Through `MmioTransport::device_mut`: [`Balloon::set_target`],
//!    [`Balloon::request_statistics`]; through `device`:
//!    [`Balloon::target_mib`], [`Balloon::actual_mib`],
//!    [`Balloon::reported_bytes`], [`Balloon::statistics`].

mod account;
mod config;
pub mod device;
mod queues;
pub mod reclaim;
mod request;
pub mod state;
pub mod statistics;

#[cfg(test)]
mod tests;

pub use account::BalloonArgs;
pub use device::{Balloon, TargetError};
pub use reclaim::Reclaim;
pub use state::{BalloonState, RestoreError};
pub use statistics::{Statistics, StatisticsBoard};

/// Bytes of the unit in which the balloon counts, whatever the guest's pages
/// are (Virtio 1.3 §5.5.6).
pub const PAGE: u64 = 4096;

/// Pages of a MiB.
const PAGES_PER_MIB: u32 = 256;

/// Entries of the inflate, deflate, statistics and reporting queue. The last
/// one must hold a request of Linux's, which has up to 32 buffers; in the
/// others Linux has one buffer at a time.
const QUEUE_SIZES: [u16; 4] = [16, 16, 4, 32];

/// Most page numbers taken from one request. Linux sends 256, Windows 1024. A
/// guest that sends more keeps the pages beyond, which is allowed.
const PAGES_MAX: usize = 1024;

/// Most bytes of statistics looked at: four times as many entries as there
/// are statistics.
const STATISTICS_BYTES_MAX: usize = 640;
