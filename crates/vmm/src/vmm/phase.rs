//! The phases of a VM's life.
//!
//! ```text
//!             start(paused: false)            first entry
//!   Built ──────────────────────▶ Starting ────────────────▶ Running
//!     │                               │                       ▲   │
//!     │ start(paused: true)           └──────── pause ──┐  resume pause
//!     ├───────────────────────────────────────────────▶ ▼     │   ▼
//!     │                                              Paused ──┘ ◀─┘
//!     │ hold              begin                         ▲
//!     └─────▶ Held ───────────────▶ Running             │
//!              ▲ │ pause          begin                 │
//!       resume │ ▼                                      │
//!           HeldPaused ─────────────────────────────────┘
//!
//!   any of them ──── the guest's request, a failure, lost memory ─▶ Ended
//! ```

use crate::ending::Ending;
use crate::vcpu::Vcpu;

/// The phase of a VM.
pub enum Phase {
    /// Built; its vCPUs have no threads yet.
    Built(Vec<Vcpu>),
    /// Its vCPUs may enter the guest, and none has yet.
    Starting,
    /// Its guest runs.
    Running {
        /// When it was last resumed, CLOCK_MONOTONIC nanoseconds; 0 if it was never paused.
        since_ns: u64,
    },
    /// vCPUs and devices are stopped.
    Paused {
        /// When it was paused, CLOCK_MONOTONIC nanoseconds; `None` if no vCPU has entered the
        /// guest.
        since_ns: Option<u64>,
    },
    /// Restored and ready: devices work, and vCPUs wait for the order to begin.
    Held,
    /// Held, with its devices paused.
    HeldPaused {
        /// When it was paused, CLOCK_MONOTONIC nanoseconds.
        since_ns: u64,
    },
    /// The VM ends.
    Ended {
        /// The reason.
        ending: Ending,
        /// Whether vCPUs and devices are stopped.
        is_still: bool,
    },
}

impl Phase {
    /// Whether vCPUs and devices are stopped, so that it can be saved.
    pub fn is_still(&self) -> bool {
        match self {
            Phase::Built(_) | Phase::Paused { .. } | Phase::HeldPaused { .. } => true,
            Phase::Starting | Phase::Running { .. } | Phase::Held => false,
            Phase::Ended { is_still, .. } => *is_still,
        }
    }

    /// Whether the guest waits for the order to begin.
    pub fn is_held(&self) -> bool {
        matches!(self, Phase::Held | Phase::HeldPaused { .. })
    }

    /// When vCPUs were stopped, CLOCK_MONOTONIC nanoseconds, if known.
    pub fn paused_since_ns(&self) -> Option<u64> {
        match self {
            Phase::Paused { since_ns } => *since_ns,
            Phase::HeldPaused { since_ns } => Some(*since_ns),
            _ => None,
        }
    }

    /// Why it ends, if it does.
    pub fn ending(&self) -> Option<&Ending> {
        match self {
            Phase::Ended { ending, .. } => Some(ending),
            _ => None,
        }
    }

    /// Ends the VM. Only the first reason counts.
    pub fn end(&mut self, ending: Ending) {
        if self.ending().is_none() {
            self.end_instead(ending);
        }
    }

    /// Ends the VM for this reason, which replaces any other.
    pub fn end_instead(&mut self, ending: Ending) {
        let is_still = self.is_still();
        *self = Phase::Ended { ending, is_still };
    }

    /// Called when a vCPU has entered the guest for the first time.
    pub fn entered(&mut self) {
        if matches!(self, Phase::Starting) {
            *self = Phase::Running { since_ns: 0 };
        }
    }

    /// Called when vCPUs and devices are stopped, since `since_ns`.
    pub fn paused(&mut self, since_ns: u64) {
        *self = match std::mem::replace(self, Phase::Starting) {
            Phase::Held => Phase::HeldPaused { since_ns },
            Phase::Starting => Phase::Paused { since_ns: None },
            Phase::Running { .. } => Phase::Paused {
                since_ns: Some(since_ns),
            },
            Phase::Ended { ending, .. } => Phase::Ended {
                ending,
                is_still: true,
            },
            still => still,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_wire::vmm::ExitReason;

    fn ending(message: &str) -> Ending {
        Ending {
            reason: ExitReason::Stopped,
            message: message.into(),
        }
    }

    #[test]
    fn a_paused_vm_remembers_if_it_was_held_or_had_run() {
        let mut phase = Phase::Held;
        phase.paused(5);
        assert!(phase.is_still() && phase.is_held());
        assert_eq!(phase.paused_since_ns(), Some(5));
        let mut phase = Phase::Starting;
        phase.paused(5);
        assert!(phase.is_still() && phase.paused_since_ns().is_none());
        let mut phase = Phase::Starting;
        phase.entered();
        phase.paused(5);
        assert_eq!(phase.paused_since_ns(), Some(5));
        phase.entered();
        assert!(phase.is_still(), "the first entry is reported late");
    }

    #[test]
    fn the_first_ending_wins_unless_the_guest_ended() {
        let mut phase = Phase::Running { since_ns: 0 };
        phase.end(ending("first"));
        phase.end(ending("second"));
        assert_eq!(phase.ending().unwrap().message, "first");
        assert!(!phase.is_still() && !phase.is_held());
        phase.paused(5);
        assert!(phase.is_still(), "it can be saved even so");
        phase.end_instead(ending("the guest powered off"));
        assert_eq!(phase.ending().unwrap().message, "the guest powered off");
        assert!(phase.is_still());
    }
}
