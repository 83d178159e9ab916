//! Clocks: the monotonic one of timelines, and the date.

pub use jiffy_sys::clock::monotonic_ns;
use std::time::{SystemTime, UNIX_EPOCH};

/// Seconds since 1970.
pub fn unix_seconds() -> u64 {
    unix_millis() / 1000
}

/// Milliseconds since 1970.
pub fn unix_millis() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_millis() as u64)
}

/// The boot id of this kernel, which names its monotonic clock.
pub fn boot_id() -> String {
    jiffy_sys::clock::boot_id().unwrap_or_else(|_| "unknown".to_owned())
}
