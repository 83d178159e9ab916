//! The clone gate, seen from outside: a restored guest says that it has taken
//! on its new identity, in time, or its VM ends.
//!
//! The guest holds its workload frozen until then; this side only makes sure
//! that it does not stay so for ever.

use crate::ending::Ending;
use jiffy_wire::trace::{MARK_GATE_FAILED, MARK_GATE_PASSED};
use jiffy_wire::vmm::{ExitReason, Restore};
use std::time::{Duration, Instant};

/// Where a guest stands before the gate.
#[derive(Debug, Clone, Copy, Default)]
pub enum Gate {
    /// There is none, or the guest has passed it.
    #[default]
    Open,
    /// It has this long.
    Closed {
        /// For messages.
        patience: Duration,
        /// Counted from the first time the vCPUs run; none before that.
        until: Option<Instant>,
    },
}

/// What the guest said, if the mark is about the gate.
pub fn verdict(mark: u8) -> Option<bool> {
    match mark {
        MARK_GATE_PASSED => Some(true),
        MARK_GATE_FAILED => Some(false),
        _ => None,
    }
}

impl Gate {
    /// The gate of a VM restored so.
    pub fn of(restore: &Restore) -> Gate {
        match &restore.generation {
            None => Gate::Open,
            Some(generation) => Gate::Closed {
                patience: Duration::from_millis(generation.deadline_ms.into()),
                until: None,
            },
        }
    }

    /// The vCPUs run from now on.
    pub fn running(&mut self) {
        if let Gate::Closed { patience, until } = self {
            until.get_or_insert_with(|| Instant::now() + *patience);
        }
    }

    /// The guest has spoken; what this means for the VM, if it is the end.
    pub fn spoken(&mut self, passed: bool) -> Option<Ending> {
        if matches!(self, Gate::Open) {
            return None;
        }
        *self = Gate::Open;
        (!passed).then(|| Ending {
            reason: ExitReason::GuestFault,
            message: "the restored guest could not take on an identity of its own".into(),
        })
    }

    /// How long the guest still has; none if nothing is awaited.
    pub fn left(&self) -> Option<Duration> {
        match self {
            Gate::Closed {
                until: Some(until), ..
            } => Some(until.saturating_duration_since(Instant::now())),
            _ => None,
        }
    }

    /// The end of a VM whose guest has had its time.
    pub fn overdue(&self) -> Option<Ending> {
        match self {
            Gate::Closed { patience, .. } if self.left() == Some(Duration::ZERO) => Some(Ending {
                reason: ExitReason::GuestFault,
                message: format!(
                    "the restored guest did not take on an identity of its own within {} ms",
                    patience.as_millis()
                ),
            }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn closed(patience: Duration) -> Gate {
        let mut gate = Gate::Closed {
            patience,
            until: None,
        };
        assert!(gate.left().is_none(), "nothing runs yet");
        gate.running();
        gate
    }

    #[test]
    fn a_guest_that_is_late_ends() {
        let gate = closed(Duration::ZERO);
        let ending = gate.overdue().unwrap();
        assert_eq!(ending.reason, ExitReason::GuestFault);
        assert!(closed(Duration::from_secs(60)).overdue().is_none());
        assert!(Gate::Open.overdue().is_none());
    }

    #[test]
    fn the_first_word_counts() {
        let mut gate = closed(Duration::from_secs(60));
        assert!(gate.spoken(true).is_none());
        assert!(gate.spoken(false).is_none(), "it is through");
        assert!(gate.left().is_none());
        let mut gate = closed(Duration::from_secs(60));
        assert!(gate.spoken(false).is_some());
    }

    #[test]
    fn only_two_marks_are_about_the_gate() {
        let verdicts: Vec<bool> = (0..=255).filter_map(verdict).collect();
        assert_eq!(verdicts, [true, false]);
    }
}
