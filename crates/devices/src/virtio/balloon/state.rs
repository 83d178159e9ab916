//! What a snapshot keeps of the balloon.

use super::PAGES_PER_MIB;
use super::account::BalloonArgs;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// A saved balloon. The transport saves its queues. Requests that wait in a queue are answered
/// after the restore, and so is the buffer of statistics, which is in its queue while the device is
/// paused. Counters start from zero.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BalloonState {
    /// The target size in pages of 4 KiB.
    pub target_pages: u32,
    /// The size in pages of 4 KiB, as the driver reports it.
    pub actual_pages: u32,
    /// The value with which the driver fills free pages.
    pub poison: u32,
    /// The target has changed while the device was paused, and the driver was not notified yet.
    pub untold: bool,
}

/// A saved balloon that withholds memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WithholdingState {
    /// What any balloon has.
    pub balloon: BalloonState,
    /// Pages of 4 KiB that the driver gave and has not taken back.
    pub given_pages: u32,
}

/// Why a saved balloon can't be restored.
#[derive(Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum RestoreError {
    /// The target is larger than the VM's memory.
    #[error("the saved balloon's target is {target_mib} MiB, but the VM has {ram_mib} MiB")]
    Target {
        /// The target in the state.
        target_mib: u32,
        /// The VM's memory.
        ram_mib: u64,
    },
    /// It has more pages than the VM.
    #[error("the saved balloon has {given} pages, but the VM has {ram}")]
    Given {
        /// Pages in the balloon.
        given: u32,
        /// The VM's pages.
        ram: u64,
    },
}

impl BalloonState {
    /// Refuses a state that no balloon of this VM could have saved.
    pub(super) fn check(&self, args: &BalloonArgs) -> Result<(), RestoreError> {
        if u64::from(self.target_pages) * super::PAGE <= args.ram_bytes {
            return Ok(());
        }
        Err(RestoreError::Target {
            target_mib: self.target_pages.div_ceil(PAGES_PER_MIB),
            ram_mib: args.ram_bytes >> 20,
        })
    }
}
