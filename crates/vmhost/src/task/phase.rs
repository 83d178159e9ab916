//! What a VM's task holds: one phase at a time.
//!
//! ```text
//!          start                     the VMM is gone, and all is taken in
//!  Idle ──────────▶ Active ──────────────────────────────────────────────▶ Idle
//!                   │    ▲
//!                   │    └──────────────────────────────────┐ record written, VMM spawned
//!   hibernated, the │                                       │
//!   VMM is gone     ▼           wake                        │
//!                 Asleep ────────────────────────────────▶ Waking
//!                   ▲                                       │ can't be spawned
//!                   └───────────────────────────────────────┘
//! ```
//!
//! `Asleep` and `Waking` end in `Idle` when the VM is killed or removed, and `Active` goes
//! back to `Asleep` when a VM that woke never passed its gate. An active VM has a [`Course`]
//! and a [`Gate`], each with what it needs and nothing beside it:
//!
//! ```text
//!  Course:  Runs ──▶ Hibernates ──▶ (Asleep)           Gate:  New ──────┐
//!             ▲          │ not written, or killed             Golden ──┼──▶ Open
//!             └──────────┘                                    Waking ──┘
//!           Runs ──▶ Stops: Agent ──▶ PoweringOff ──▶ Control ──▶ Killed
//! ```
//!
//! The state that others see is the record's (`VmState`); it is written down, and this is not.

use super::actor::Running;
use super::stop::Stopping;
use crate::launch::Plan;
use jiffy_content::error::Result;
use jiffy_content::volumes::Lease;
use tokio::sync::oneshot;

/// What a VM's task holds.
pub(super) enum Phase {
    /// No VMM: it was never started, or has ended.
    Idle,
    /// No VMM: its memory is on disk, and nobody else may write to its volumes.
    Asleep(Vec<Lease>),
    /// The same, but it wakes as soon as its record says so.
    Waking(Waking),
    /// It has a VMM.
    Active(Box<Running>),
}

/// A VM about to wake.
pub(super) struct Waking {
    pub(super) volumes: Vec<Lease>,
    pub(super) asked: Asked,
    pub(super) plan: Box<Plan>,
}

/// Something to be done once the record is on disk.
pub(super) struct Asked {
    /// Says that it is.
    pub(super) saved: oneshot::Receiver<Result<()>>,
    /// Who asked.
    pub(super) reply: oneshot::Sender<Result<()>>,
}

/// What is to become of a VM that has a VMM.
pub(super) enum Course {
    /// It goes on.
    Runs,
    /// Its memory is on disk: the VMM is killed once the record says so, and that is not the
    /// VM's end.
    Hibernates(Asked),
    /// It is to end.
    Stops(Stopping),
}

/// Where a VM is on its way from a captured one to itself.
#[derive(Debug)]
pub(super) enum Gate {
    /// It was not restored, or is through.
    Open,
    /// A new VM that has not begun.
    New,
    /// A golden snapshot that has not begun.
    Golden {
        /// The snapshot's name.
        name: String,
        /// Boots, if the snapshot can't be restored.
        fallback: Box<Plan>,
    },
    /// A VM that slept and is not awake.
    Waking,
}

impl Phase {
    /// What there is beside a VMM.
    pub(super) fn running(&self) -> Option<&Running> {
        match self {
            Phase::Active(running) => Some(running),
            _ => None,
        }
    }

    /// Takes what there is beside a VMM, which is gone.
    pub(super) fn take_running(&mut self) -> Option<Box<Running>> {
        match std::mem::replace(self, Phase::Idle) {
            Phase::Active(running) => Some(running),
            other => {
                *self = other;
                None
            }
        }
    }
}
