//! What a snapshot keeps of a network device.

use super::error::NetError;
use super::mac::Mac;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// A saved network device: the properties that its guest knows. The transport saves its queues.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetState {
    /// The guest's address.
    pub mac: Mac,
    /// The MTU that the driver read, bytes.
    pub mtu: Option<u16>,
    /// Pairs of queues of the device.
    pub pairs: u16,
    /// Pairs that the driver uses.
    pub used_pairs: u16,
    /// The guest must announce itself to its neighbours, and has not yet.
    pub announce: bool,
}

/// Why a saved network device can't be restored.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// The device can't be created.
    #[error(transparent)]
    Net(#[from] NetError),
    /// The driver has set up another number of queues.
    #[error(
        "the saved network device has {saved} pairs of queues, the one to restore has {actual}"
    )]
    Pairs {
        /// Pairs in the state.
        saved: u16,
        /// Pairs of the device.
        actual: u16,
    },
    /// More pairs are used than the device has, or none.
    #[error("the saved network device uses {used} of {pairs} pairs of queues")]
    UsedPairs {
        /// Pairs that are used.
        used: u16,
        /// Pairs of the device.
        pairs: u16,
    },
}

impl NetState {
    /// Checks that a device with `actual` pairs of queues could have saved this state.
    pub(super) fn check(&self, actual: u16) -> Result<(), RestoreError> {
        if self.pairs != actual {
            let saved = self.pairs;
            return Err(RestoreError::Pairs { saved, actual });
        }
        if !(1..=self.pairs).contains(&self.used_pairs) {
            return Err(RestoreError::UsedPairs {
                used: self.used_pairs,
                pairs: self.pairs,
            });
        }
        Ok(())
    }
}
