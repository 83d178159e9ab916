//! The monotonic clock of all timelines, and the id of the boot from which it counts.

use rustix::time::{ClockId, clock_gettime};
use std::io;

/// Nanoseconds of CLOCK_MONOTONIC. Read through the vDSO: no system call.
pub fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// The id of the kernel's boot, a UUID, which identifies the monotonic clock
/// (Documentation/admin-guide/sysctl/kernel.rst, `random`).
///
/// # Errors
///
/// If `/proc/sys/kernel/random/boot_id` can't be read.
pub fn boot_id() -> io::Result<String> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    Ok(text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::{boot_id, monotonic_ns};

    #[test]
    fn a_boot_has_one_id() {
        let id = boot_id().unwrap();
        assert_eq!(id.len(), 36);
        assert_eq!(boot_id().unwrap(), id);
    }

    #[test]
    fn the_monotonic_clock_advances() {
        let before = monotonic_ns();
        std::thread::sleep(std::time::Duration::from_millis(2));
        assert!(monotonic_ns() - before >= 2_000_000);
    }
}
