//! Interrupts each CPU of the machine once a second.
//!
//! QEMU's TCG rarely loses an interrupt: when a nested guest exits (`do_vmexit` in svm_helper.c of
//! QEMU 7.2), the CPU's thread changes `interrupt_request` without the lock that
//! other threads hold when they raise an interrupt. The interrupt stays pending in the APIC and is
//! delivered with the next one. If the lost one was the timer's and the CPU then becomes idle, there
//! is no next one, and runnable threads wait, once for fourteen minutes.
//!
//! The hardware clock is a device of its own, so its interrupt ends such a wait.

use jiffy_sys::rtc::{FIRST, Seconds};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::io;
use std::path::Path;

/// Runs until it fails.
///
/// # Errors
///
/// If the hardware clock can't be opened or read, or the affinity can't be set.
pub fn run() -> io::Result<()> {
    let mut clock = Seconds::of(Path::new(FIRST))?;
    let all = sched_getaffinity(None)?;
    loop {
        clock.wait()?;
        visit_cpus(&all)?;
    }
}

/// Runs on each of these CPUs once. Moving to a CPU interrupts it.
fn visit_cpus(all: &CpuSet) -> io::Result<()> {
    if all.count() == 1 {
        return Ok(());
    }
    for cpu in (0..CpuSet::MAX_CPU).filter(|cpu| all.is_set(*cpu)) {
        let mut one = CpuSet::new();
        one.set(cpu);
        sched_setaffinity(None, &one)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::thread::sched_getcpu;

    #[test]
    fn visiting_all_cpus_ends_on_the_last() {
        let all = sched_getaffinity(None).unwrap();
        let last = (0..CpuSet::MAX_CPU).rfind(|cpu| all.is_set(*cpu)).unwrap();
        visit_cpus(&all).unwrap();
        if all.count() > 1 {
            assert_eq!(sched_getcpu(), last);
        }
        sched_setaffinity(None, &all).unwrap();
    }
}
