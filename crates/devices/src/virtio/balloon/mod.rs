//! The memory balloon (Virtio 1.3 §5.5): takes memory from a guest that has more than it needs, and
//! returns memory to the host that the guest reports free.
//!
//! * [`device`]: the virtio device and its target.
//! * [`reclaim`]: releases the memory, and limits how much one notification may release.
//! * [`statistics`]: the guest's memory statistics.
//! * [`state`]: what a snapshot keeps of the balloon.
//! * `account`: the balloon's options, and its counters, which outlive activations.
//! * `config`: the configuration space.
//! * `queues`: the four queues, activated.
//! * `request`: page numbers, ranges and statistics, read from guest memory and checked.
//!
//! It has no thread. A guest that inflates waits for the answer anyway (Linux sends 256 page
//! numbers and sleeps until they are used), so a thread would save nothing, and every restore would
//! have to start it. Free page reporting comes at most every two seconds, in requests of at most 32
//! blocks of 2 or 4 MiB (Linux, mm/page_reporting.c): a few milliseconds on the vCPU that runs the
//! report, less than clearing those pages again costs the guest. [`reclaim::Budget`] limits a
//! hostile guest, which delays only itself.
//!
//! What the VMM must do:
//!
//! 1. Implement [`Reclaim`]. `release` is called on the vCPU thread that notified, or on the thread
//!    that resumes a paused or restored VM.
//! 2. Put `Balloon::new(BalloonArgs { ram_bytes, reclaim })`, or [`Balloon::restore`] with the
//!    saved [`BalloonState`], behind a `MmioTransport`, which then has no doorbells to register.
//!    A second balloon, [`Balloon::withholding`], may hold what is above the memory that a guest may
//!    use for now: its pages come back only when its target is lowered, so the other balloon can
//!    take a guest's caches beside it.
//! 3. Call, through `MmioTransport::device_mut`, [`Balloon::set_target`] and
//!    [`Balloon::request_statistics`], and through `device`, [`Balloon::target_mib`],
//!    [`Balloon::actual_mib`], [`Balloon::reported_bytes`] and [`Balloon::statistics`].

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
pub use state::{BalloonState, RestoreError, WithholdingState};
pub use statistics::{Statistics, StatisticsBoard};

/// Bytes of the balloon's unit, whatever the size of the guest's pages (Virtio 1.3 §5.5.6).
pub const PAGE: u64 = 4096;

/// Pages of a MiB.
const PAGES_PER_MIB: u32 = 256;

/// Entries of the inflate, deflate, statistics and reporting queue. The last one must hold a
/// request of Linux's, which has up to 32 buffers; in the others Linux has one buffer at a time.
const QUEUE_SIZES: [u16; 4] = [16, 16, 4, 32];

/// Most page numbers of one request. Linux sends 256, Windows 1024. Further pages stay with the
/// guest, which is allowed.
const PAGES_MAX: usize = 1024;

/// Most bytes of statistics that are read: four times as many entries as there are statistics.
const STATISTICS_BYTES_MAX: usize = 640;
