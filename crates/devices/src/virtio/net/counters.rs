//! What went through a device and what did not.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts of one device, over all its queues, since it was made. Directions are the
/// guest's.
#[derive(Debug, Default)]
pub struct Counters {
    pub(super) received: Direction,
    pub(super) sent: Direction,
    /// Sent with an address that is not the device's.
    pub(super) spoofed: AtomicU64,
}

/// One way.
#[derive(Debug, Default)]
pub(super) struct Direction {
    frames: AtomicU64,
    bytes: AtomicU64,
    dropped: AtomicU64,
}

impl Direction {
    /// A frame of so many bytes, without its virtio header, has gone.
    pub(super) fn passed(&self, bytes: usize) {
        self.frames.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// A frame has not.
    pub(super) fn dropped(&self) {
        self.dropped.fetch_add(1, Ordering::Relaxed);
    }
}

/// [`Counters`] at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Frames to the guest.
    pub received_frames: u64,
    /// Their bytes.
    pub received_bytes: u64,
    /// Frames for which the guest had no room.
    pub received_dropped: u64,
    /// Frames from the guest.
    pub sent_frames: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// Frames of the guest's that were malformed, or that the host did not take.
    pub sent_dropped: u64,
    /// Frames of the guest's with another's address; dropped too.
    pub sent_spoofed: u64,
}

impl Counters {
    /// The counts now.
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
        }
    }
}
