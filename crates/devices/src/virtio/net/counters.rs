//! Counters of a device's traffic.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts of one device, over all its queues, since it was created. Directions are the guest's.
#[derive(Debug, Default)]
pub struct Counters {
    pub(super) received: Direction,
    pub(super) sent: Direction,
    /// Frames that the guest sent with another source address than the device's.
    pub(super) spoofed: AtomicU64,
    /// Frames that the guard did not let pass.
    pub(super) refused: AtomicU64,
}

/// Counters of one direction.
#[derive(Debug, Default)]
pub(super) struct Direction {
    frames: AtomicU64,
    bytes: AtomicU64,
    dropped: AtomicU64,
}

impl Direction {
    /// Counts a frame of `bytes` bytes, without its virtio header.
    pub(super) fn passed(&self, bytes: usize) {
        self.frames.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Counts a dropped frame.
    pub(super) fn dropped(&self) {
        self.dropped.fetch_add(1, Ordering::Relaxed);
    }
}

/// The values of [`Counters`] at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Frames to the guest.
    pub received_frames: u64,
    /// Their bytes.
    pub received_bytes: u64,
    /// Frames for which the guest had no buffers.
    pub received_dropped: u64,
    /// Frames from the guest.
    pub sent_frames: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// Frames from the guest that were malformed, or that the host did not take.
    pub sent_dropped: u64,
    /// Frames from the guest with another source address; also dropped.
    pub sent_spoofed: u64,
    /// Frames from the guest to destinations that are closed to it; also dropped.
    pub sent_refused: u64,
}

impl Counters {
    /// The current counts.
    pub fn totals(&self) -> Totals {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Totals {
            received_frames: read(&self.received.frames),
            received_bytes: read(&self.received.bytes),
            received_dropped: read(&self.received.dropped),
            sent_frames: read(&self.sent.frames),
            sent_bytes: read(&self.sent.bytes),
            sent_dropped: read(&self.sent.dropped),
            sent_spoofed: read(&self.spoofed),
            sent_refused: read(&self.refused),
        }
    }
}
