//! State of the agent while programs are frozen for a capture.

use crate::freezer::Frozen;
use alloc::string::String;
use rustix::fd::OwnedFd;

/// A `Request::Quiesce` and its state.
#[derive(Debug)]
pub(super) struct Hold {
    /// The connection's number.
    pub(super) connection: u64,
    pub(super) frozen: Frozen,
    /// The id of the generation before the capture.
    pub(super) known: Option<String>,
    /// The random device, for a new generation's seed.
    pub(super) random: OwnedFd,
    pub(super) drop_caches: bool,
    pub(super) phase: Phase,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Waits until the host confirms the output, or until `give_up_at`.
    Delivering { give_up_at: u64 },
    /// The request was answered: all programs are frozen.
    Answered,
}

impl Hold {
    pub(super) fn deadline(&self) -> Option<u64> {
        match self.phase {
            Phase::Delivering { give_up_at } => Some(give_up_at),
            Phase::Answered => None,
        }
    }
}
