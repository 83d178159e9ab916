//! Memory that a balloon withholds while the guest boots.

use alloc::{format, string::String};
use rustix::thread::{Timespec, nanosleep};

/// How often the size of memory is read.
const POLL: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 1_000_000,
};
/// Most polls in which no more is withheld. Linux pauses for 200 ms when it finds no free memory.
const IDLE_POLLS: u32 = 1000;

/// Waits until the kernel's driver has given the balloon so much that programs see `mib` of memory or
/// less. They would otherwise size themselves by what they lose later.
///
/// # Errors
///
/// If the balloon takes no more before that.
pub fn wait_for_balloon(mib: u32) -> Result<(), String> {
    let wanted = u64::from(mib) << 20;
    let (mut least, mut idle_polls) = (u64::MAX, 0);
    loop {
        let info = rustix::system::sysinfo();
        let total = (info.totalram as u64).saturating_mul(info.mem_unit.into());
        if total <= wanted {
            return Ok(());
        }
        idle_polls = if total < least { 0 } else { idle_polls + 1 };
        least = least.min(total);
        if idle_polls > IDLE_POLLS {
            return Err(format!(
                "programs see {} MiB of memory instead of {mib}: the balloon took no more",
                total >> 20
            ));
        }
        let _ = nanosleep(&POLL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_balloon_that_takes_nothing_is_reported() {
        wait_for_balloon(u32::MAX).unwrap();
        let error = wait_for_balloon(1).unwrap_err();
        assert!(error.contains("instead of 1"), "{error}");
    }
}
