//! Probes this host's KVM.
//!
//! The presence of `/dev/kvm` is not sufficient: on some hosts it emulates guest kernel code in
//! software, slowly, and gets `syscall` wrong, so that an ordinary Linux crawls and then crashes.
//! The probe runs a tiny guest that times a loop in ring 0 and makes one `syscall` from ring 3.
//!
//! Speed is compared with the same loop in this process at the same time: inside an emulated
//! machine everything is slow, although its KVM is real.

mod guest;

use crate::hypervisor::{Hypervisor, HypervisorError};
use guest::{Outcome, ProbeGuest};
use jiffy_sys::clock::monotonic_ns;
use jiffy_wire::vmm::{KvmKind, KvmProbe};
use std::io::ErrorKind;
use std::time::Duration;

/// The guest is stopped after this time in any case. It is far more than the guest needs, even
/// inside an emulated machine on a busy host.
const TIME_LIMIT: Duration = Duration::from_millis(250);
/// A loop this many times slower than natively is not executed by the processor.
const SLOW: u64 = 8;
/// A loop this many times slower need not be timed more precisely.
const CLEARLY_SLOW: u64 = 100;
/// Iterations that software emulation does in a millisecond.
const SHORT_ROUND: u32 = 500;
/// Iterations that a processor, or an emulated one, does in about a millisecond.
const LONG_ROUND: u32 = 400_000;
/// Number of rounds; the fastest counts.
const ROUNDS: usize = 3;

/// Probes `/dev/kvm`; takes some milliseconds.
pub fn probe() -> KvmProbe {
    let begun = monotonic_ns();
    let mut probe = match open() {
        Ok(hypervisor) => match measure(&hypervisor) {
            Ok(measured) => classify(&measured),
            Err(error) => no_kvm(format!(
                "/dev/kvm exists but can't run a guest: {}",
                crate::error::sentence(&error)
            )),
        },
        Err(detail) => no_kvm(detail),
    };
    probe.took_us = (monotonic_ns() - begun) / 1000;
    probe
}

/// The measurements of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Measurements {
    /// Picoseconds per iteration in the guest's ring 0, and natively.
    loop_ps: Option<(u64, u64)>,
    syscall: Option<bool>,
}

fn open() -> Result<Hypervisor, String> {
    Hypervisor::open().map_err(|error| match &error {
        HypervisorError::Open(cause) if cause.kind() == ErrorKind::NotFound => {
            "there is no /dev/kvm".into()
        }
        HypervisorError::Open(cause) if cause.kind() == ErrorKind::PermissionDenied => {
            "this user may not open /dev/kvm".into()
        }
        _ => crate::error::sentence(&error),
    })
}

fn no_kvm(detail: String) -> KvmProbe {
    KvmProbe {
        kind: KvmKind::None,
        detail,
        ring0_ps_per_iteration: None,
        syscall_enters_ring0: None,
        took_us: 0,
    }
}

fn classify(measured: &Measurements) -> KvmProbe {
    let speed = match measured.loop_ps {
        None => "guest kernel code did not finish within the time limit".to_owned(),
        Some((guest, native)) => {
            let tenths = guest * 10 / native.max(1);
            format!(
                "guest kernel code takes {}.{} times as long as native code",
                tenths / 10,
                tenths % 10
            )
        }
    };
    let syscall = match measured.syscall {
        Some(true) => "`syscall` from ring 3 arrives in ring 0",
        Some(false) => "`syscall` from ring 3 does not arrive in ring 0",
        None => "`syscall` could not be tested",
    };
    let fast = measured
        .loop_ps
        .is_some_and(|(guest, native)| guest < native.saturating_mul(SLOW));
    KvmProbe {
        kind: if fast && measured.syscall == Some(true) {
            KvmKind::Real
        } else {
            KvmKind::Emulated
        },
        detail: format!("{speed}, and {syscall}"),
        ring0_ps_per_iteration: measured.loop_ps.map(|(guest, _)| guest),
        syscall_enters_ring0: measured.syscall,
        took_us: 0,
    }
}

fn measure(hypervisor: &Hypervisor) -> Result<Measurements, HypervisorError> {
    let mut guest = ProbeGuest::create(hypervisor)?;
    Ok(guest.with_watchdog(TIME_LIMIT, |guest| {
        let rough = time_loop(guest, SHORT_ROUND);
        let syscall = match guest.try_syscall() {
            Outcome::Done => Some(true),
            Outcome::Failed => Some(false),
            // The guest did not return from ring 3, or was not sent there.
            Outcome::Late => None,
        };
        let clearly_slow = rough.is_none_or(|(guest, native)| guest > native * CLEARLY_SLOW);
        let exact = match syscall {
            Some(true) if !clearly_slow => time_loop(guest, LONG_ROUND),
            _ => None,
        };
        Measurements {
            loop_ps: exact.or(rough),
            syscall,
        }
    }))
}

/// Times `count` iterations of the loop in the guest and here, alternately; returns picoseconds per
/// iteration, of the fastest of some rounds.
fn time_loop(guest: &mut ProbeGuest, count: u32) -> Option<(u64, u64)> {
    let (mut overhead, mut in_guest, mut native) = (u64::MAX, u64::MAX, u64::MAX);
    for _ in 0..ROUNDS {
        // The cost of entry and exit.
        overhead = overhead.min(guest.round(1)?);
        in_guest = in_guest.min(guest.round(count)?);
        native = native.min(guest::native_round(count));
    }
    let in_guest = in_guest.saturating_sub(overhead);
    Some((per_iteration(in_guest, count), per_iteration(native, count)))
}

/// Picoseconds per iteration.
fn per_iteration(ns: u64, count: u32) -> u64 {
    (ns * 1000 / u64::from(count)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::time::{ClockId, clock_gettime};

    #[test]
    fn a_slow_or_broken_kvm_is_judged_emulated() {
        let kind = |loop_ps, syscall| classify(&Measurements { loop_ps, syscall }).kind;
        assert_eq!(kind(Some((400, 390)), Some(true)), KvmKind::Real);
        // Everything is slow, as inside an emulated machine.
        assert_eq!(kind(Some((9000, 8000)), Some(true)), KvmKind::Real);
        assert_eq!(kind(Some((40_000, 400)), Some(true)), KvmKind::Emulated);
        assert_eq!(kind(Some((400, 390)), Some(false)), KvmKind::Emulated);
        assert_eq!(kind(Some((400, 390)), None), KvmKind::Emulated);
        assert_eq!(kind(None, None), KvmKind::Emulated);
    }

    #[test]
    fn the_probe_is_quick() {
        let used_us = || {
            let used = clock_gettime(ClockId::ThreadCPUTime);
            used.tv_sec * 1_000_000 + used.tv_nsec / 1000
        };
        let probe_once = || {
            let before = used_us();
            let probe = probe();
            assert!(!probe.detail.is_empty());
            assert!(probe.took_us < 60_000_000, "{probe:?}");
            used_us() - before
        };
        // A host that is a VM may be charged for time in which it did not run.
        let used = (0..3).map(|_| probe_once()).min().unwrap();
        assert!(used < 500_000, "{used} us");
    }
}
