//! The clone gate, as the monitor sees it: a restored guest must report in time that it
//! has taken on its new identity, or its VM ends.
//!
//! The guest keeps its workload frozen until then; the monitor only limits how long.
//!
//! ```text
//!            vCPUs run             passed
//!   Closed ─────────────▶ Timed ──────────▶ Open
//!                           │ failed, or too late
//!                           ▼
//!                       (VM ends)
//! ```

use crate::ending::Ending;
use jiffy_sys::handed;
use jiffy_wire::trace::{MARK_GATE_FAILED, MARK_GATE_PASSED};
use jiffy_wire::vmm::{ExitReason, Restore};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The state of the gate.
#[derive(Debug, Clone, Default)]
pub enum Gate {
    /// There is no gate, or the guest has reported.
    #[default]
    Open,
    /// The vCPUs have not run yet.
    Closed(Terms),
    /// The guest's time passes.
    Timed {
        /// What it has to do.
        terms: Terms,
        /// The end of its time.
        until: Instant,
    },
}

/// What a guest has to do to pass.
#[derive(Debug, Clone)]
pub struct Terms {
    /// The time that it has.
    time_limit: Duration,
    /// The file that records that it has passed, if one does.
    record: Option<PathBuf>,
}

/// Whether this mark reports that the guest has passed the gate, or has failed to; `None` for other
/// marks.
pub fn passed(mark: u8) -> Option<bool> {
    match mark {
        MARK_GATE_PASSED => Some(true),
        MARK_GATE_FAILED => Some(false),
        _ => None,
    }
}

impl Gate {
    /// The gate of a VM with this restore configuration.
    pub fn of(restore: &Restore) -> Gate {
        match &restore.generation {
            None => Gate::Open,
            Some(generation) => Gate::Closed(Terms {
                time_limit: Duration::from_millis(generation.deadline_ms.into()),
                record: restore.gate_record.clone(),
            }),
        }
    }

    /// Starts the guest's time: the vCPUs run from now on.
    pub fn running(&mut self) {
        *self = match std::mem::take(self) {
            Gate::Closed(terms) => Gate::Timed {
                until: Instant::now() + terms.time_limit,
                terms,
            },
            other => other,
        };
    }

    /// Handles the guest's report. Returns why the VM ends, if the guest did not pass.
    pub fn reported(&mut self, passed: bool) -> Option<Ending> {
        let (Gate::Closed(terms) | Gate::Timed { terms, .. }) = std::mem::take(self) else {
            return None;
        };
        if let (true, Some(record)) = (passed, terms.record)
            && let Err(error) = handed::write(&record, b"1")
        {
            // The VM is well; only a node that finds nothing else of it could restore it again.
            eprintln!("jiffy-vmm: {} can't be written: {error}", record.display());
        }
        (!passed).then(|| Ending {
            reason: ExitReason::GuestFault,
            message: "the restored guest could not take on an identity of its own".into(),
        })
    }

    /// How long the guest still has; `None` if no report is expected.
    pub fn time_left(&self) -> Option<Duration> {
        match self {
            Gate::Timed { until, .. } => Some(until.saturating_duration_since(Instant::now())),
            Gate::Open | Gate::Closed(_) => None,
        }
    }

    /// Why the VM ends, if the guest's time is over.
    pub fn overdue(&self) -> Option<Ending> {
        match self {
            Gate::Timed { terms, until } if *until <= Instant::now() => Some(Ending {
                reason: ExitReason::GuestFault,
                message: format!(
                    "the restored guest did not take on an identity of its own within {} ms",
                    terms.time_limit.as_millis()
                ),
            }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn closed(time_limit: Duration) -> Gate {
        let record = None;
        let mut gate = Gate::Closed(Terms { time_limit, record });
        assert!(gate.time_left().is_none(), "nothing runs yet");
        gate.running();
        gate
    }

    #[test]
    fn a_guest_that_misses_the_gates_deadline_is_ended() {
        let gate = closed(Duration::ZERO);
        let ending = gate.overdue().unwrap();
        assert_eq!(ending.reason, ExitReason::GuestFault);
        assert!(closed(Duration::from_secs(60)).overdue().is_none());
        assert!(Gate::Open.overdue().is_none());
    }

    #[test]
    fn only_the_first_report_to_the_gate_counts() {
        let mut gate = closed(Duration::from_secs(60));
        assert!(gate.reported(true).is_none());
        assert!(gate.reported(false).is_none(), "it is through");
        assert!(gate.time_left().is_none());
        let mut gate = closed(Duration::from_secs(60));
        assert!(gate.reported(false).is_some());
    }

    #[test]
    fn a_guest_that_passes_the_gate_is_on_record() {
        let folder = tempfile::tempdir().unwrap();
        let record = folder.path().join("passed");
        for (passes, expected) in [(false, None), (true, Some(b"1".to_vec()))] {
            let mut gate = Gate::Closed(Terms {
                time_limit: Duration::from_secs(60),
                record: Some(record.clone()),
            });
            assert_eq!(gate.reported(passes).is_none(), passes);
            assert_eq!(std::fs::read(&record).ok(), expected);
        }
    }

    #[test]
    fn only_two_marks_report_to_the_gate() {
        let reported: Vec<bool> = (0..=255).filter_map(passed).collect();
        assert_eq!(reported, [true, false]);
    }
}
