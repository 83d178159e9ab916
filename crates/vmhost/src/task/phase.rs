//! The phases of a VM's task.
//!
//! ```text
//!          start           the VMM ends             all messages handled
//!  Idle ──────────▶ Active ──────────────▶ Draining ─────────────────────▶ Idle
//!                      ▲                      │
//!                      │ record written,      │ the VM hibernates, or
//!                      │ VMM spawned          │ a woken one did not pass its gate
//!                      │         wake         ▼
//!                    Waking ◀───────────── Asleep
//!                      │                      ▲
//!                      └──────────────────────┘ can't be spawned
//! ```
//!
//! `Asleep` and `Waking` become `Idle` when the VM is killed or removed, and `Draining` becomes
//! `Active` when a golden snapshot can't be restored and the VM boots instead. A VM with a VMM has a
//! [`Course`], what its task is about to do, and a [`Guest`], how far the guest is by its own reports.
//! Each variant has only the data it needs:
//!
//! ```text
//!  Course:  Runs ──▶ Hibernates ──▶ (Asleep)
//!             ▲          │ not written, or killed
//!             └──────────┘
//!           Runs ──▶ Stops: Agent ──▶ WritesBack ──▶ Control ──▶ Killed
//!           Runs ──▶ GivesUp ──▶ (Waking: Asleep; Golden: boots)
//!
//!                       gate                 programs
//!                      passed                 ended
//!  Guest:   Restored ─────┬─────────▶ Up ─────────────▶ PowersOff
//!           Golden ───────┘           ▲                     ▲
//!           Waking ──────────▶ Woken ─┴─────────────────────┘
//!                                    ready
//! ```
//!
//! A [`Removal`] is independent of the phase: it is carried out when there is no VMM.
//!
//! Others see the state in the record (`VmState`), which is saved. Of the phase only `PowersOff` is, as a
//! guest does not report that again to the next daemon.

use super::actor::Running;
use super::stop::Stopping;
use crate::launch::Plan;
use crate::process::Ended;
use jiffy_content::error::Result;
use jiffy_content::volumes::Lease;
use tokio::sync::oneshot;

/// The phase of a VM's task.
pub(super) enum Phase {
    /// No VMM: it was never started, or has ended.
    Idle,
    /// No VMM: its memory is on disk, and its leases keep others from writing to its volumes.
    Asleep(Vec<Lease>),
    /// As `Asleep`, but it wakes as soon as its record is saved.
    Waking(Waking),
    /// It has a VMM.
    Active(Box<Running>),
    /// Its VMM has ended in this way; the last messages of its guest are handled.
    Draining(Box<Running>, Ended),
}

/// A VM about to wake.
pub(super) struct Waking {
    pub(super) volumes: Vec<Lease>,
    pub(super) asked: PendingReply,
    pub(super) plan: Box<Plan>,
}

/// A reply that waits until the record is on disk.
pub(super) struct PendingReply {
    /// Resolves when the record is saved, or could not be.
    pub(super) saved: oneshot::Receiver<Result<()>>,
    /// The caller.
    pub(super) reply: oneshot::Sender<Result<()>>,
}

/// What happens next to a VM that has a VMM.
pub(super) enum Course {
    /// It continues to run.
    Runs,
    /// Its memory is on disk. The VMM is killed once the record is saved; the VM does not end.
    Hibernates(PendingReply),
    /// It is being ended.
    Stops(Stopping),
    /// Its guest did not pass the gate in time: its VMM is killed, and the VM is hibernated again, or
    /// boots instead of being restored.
    GivesUp,
}

/// How far a guest is.
#[derive(Debug)]
pub(super) enum Guest {
    /// A new VM, restored without a fallback, that has not passed its gate.
    Restored,
    /// A VM of a golden snapshot that has not passed its gate.
    Golden {
        /// The snapshot's name.
        name: String,
        /// The plan to boot instead, if the snapshot can't be restored.
        fallback: Box<Plan>,
    },
    /// A woken VM that has not passed its gate.
    Waking,
    /// A woken VM that has passed its gate and is not ready: its memory on disk is gone, and there is
    /// no agent yet that could end its programs in order.
    Woken,
    /// It boots, or its programs run.
    Up,
    /// It has reported that its programs have ended; it is writing its disks back.
    PowersOff,
}

/// Whether the VM is being removed.
pub(super) enum Removal {
    /// It is kept.
    No,
    /// It is removed once it has ended. These wait for it.
    Requested(Vec<oneshot::Sender<Result<()>>>),
    /// It was removed: its task ends.
    Done,
}

impl Removal {
    pub(super) fn request(&mut self, reply: oneshot::Sender<Result<()>>) {
        match self {
            Removal::Requested(replies) => replies.push(reply),
            Removal::No => *self = Removal::Requested(vec![reply]),
            Removal::Done => drop(reply.send(Ok(()))),
        }
    }

    pub(super) fn is_requested(&self) -> bool {
        matches!(self, Removal::Requested(_))
    }

    pub(super) fn is_done(&self) -> bool {
        matches!(self, Removal::Done)
    }

    /// Ends it with this result, which is the reply to all who wait for it.
    pub(super) fn conclude(&mut self, result: &Result<()>) {
        let next = match result {
            Ok(()) => Removal::Done,
            Err(_) => Removal::No,
        };
        if let Removal::Requested(replies) = std::mem::replace(self, next) {
            for reply in replies {
                let _ = reply.send(result.clone());
            }
        }
    }
}

impl Phase {
    /// The parts that exist while there is a VMM, and until all messages of its guest are handled.
    pub(super) fn running(&self) -> Option<&Running> {
        match self {
            Phase::Active(running) | Phase::Draining(running, _) => Some(running),
            _ => None,
        }
    }

    /// Those parts, to change them.
    pub(super) fn running_mut(&mut self) -> Option<&mut Running> {
        match self {
            Phase::Active(running) | Phase::Draining(running, _) => Some(running),
            _ => None,
        }
    }

    /// Is it a hibernated VM whose guest is not ready again?
    pub(super) fn wakes(&self) -> bool {
        let woken = |running: &Running| matches!(running.guest, Guest::Waking | Guest::Woken);
        matches!(self, Phase::Waking(_)) || self.running().is_some_and(woken)
    }

    /// The VMM has ended.
    pub(super) fn drain(&mut self, how: Ended) {
        *self = match std::mem::replace(self, Phase::Idle) {
            Phase::Active(running) => Phase::Draining(running, how),
            other => other,
        };
    }

    /// Takes the parts of a VMM that has ended, and how it did.
    pub(super) fn take_drained(&mut self) -> Option<(Box<Running>, Ended)> {
        match std::mem::replace(self, Phase::Idle) {
            Phase::Draining(running, how) => Some((running, how)),
            other => {
                *self = other;
                None
            }
        }
    }
}
