//! What a snapshot keeps of the balloon.

use super::PAGES_PER_MIB;
use super::account::BalloonArgs;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// A saved balloon. Its queues are the transport's; a request that waits in
/// one is answered after the restore, and so is the buffer of statistics,
/// which is back in its queue while the device is paused. Counters start anew.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BalloonState {
    /// Pages that the balloon shall hold.
    pub target_pages: u32,
    /// Pages that the driver says it holds.
    pub actual_pages: u32,
    /// What the driver fills free pages with.
    pub poison: u32,
    /// The target changed while the device was paused, and the driver has not
    /// been told.
    pub untold: bool,
}

/// A saved balloon can't be restored.
#[derive(Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum RestoreError {
    /// More than there is.
    #[error("the saved balloon is to hold {target_mib} MiB, but the VM has {ram_mib} MiB")]
    Target {
        /// In the state.
        target_mib: u32,
        /// Of the VM.
        ram_mib: u64,
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
