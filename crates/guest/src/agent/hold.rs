//! What the agent keeps while programs are frozen for a capture.

use crate::freezer::Frozen;
use alloc::string::String;
use rustix::fd::OwnedFd;

/// A connection that asked for stillness, and what was done for it.
#[derive(Debug)]
pub(super) struct Hold {
    /// The connection's number.
    pub(super) connection: u64,
    pub(super) frozen: Frozen,
    /// The generation that the host showed when it asked.
    pub(super) known: Option<String>,
    /// What takes a new generation's seed.
    pub(super) random: OwnedFd,
    pub(super) drop_caches: bool,
    pub(super) phase: Phase,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// The host is still to confirm the output.
    Delivering { give_up_at: u64 },
    /// The answer was given.
    Still,
}

impl Hold {
    pub(super) fn deadline(&self) -> Option<u64> {
        match self.phase {
            Phase::Delivering { give_up_at } => Some(give_up_at),
            Phase::Still => None,
        }
    }
}
