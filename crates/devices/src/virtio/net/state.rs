//! What a snapshot keeps.

use super::error::NetError;
use super::mac::Mac;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// A saved network device: what its guest knows of it. Its queues are the transport's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetState {
    /// The guest's address.
    pub mac: Mac,
    /// As the driver read it.
    pub mtu: Option<u16>,
    /// Pairs of queues.
    pub pairs: u16,
    /// Pairs that the driver uses.
    pub used_pairs: u16,
    /// The guest was to tell its neighbours where it is, and has not yet.
    pub announce: bool,
}

/// A saved network device can't be had back.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// It can't be made.
    #[error(transparent)]
    Net(#[from] NetError),
    /// Its driver has set up other queues.
    #[error(
        "the saved network device has {saved} pairs of queues, the one to restore has {actual}"
    )]
    Pairs {
        /// Saved.
        saved: u16,
        /// Now.
        actual: u16,
    },
    /// More than there are, or none.
    #[error("the saved network device uses {used} of {pairs} pairs of queues")]
    UsedPairs {
        /// Used.
        used: u16,
        /// There are.
        pairs: u16,
    },
}

impl NetState {
    /// Whether it can have been saved from a device with so many pairs of queues.
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
