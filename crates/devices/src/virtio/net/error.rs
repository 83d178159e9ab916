//! Why a network device can't be made.

use super::PAIRS_MAX;
use super::mac::Mac;
use std::io;
use thiserror::Error;

/// A network device could not be made.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum NetError {
    /// A group's, or nobody's.
    #[error("{0} is not the MAC address of one interface")]
    Mac(Mac),
    /// Virtio 1.3 §5.1.4.1.
    #[error("an MTU of {0} bytes is outside of 68 to 65535")]
    Mtu(u16),
    /// None, or too many.
    #[error("a network device has 1 to {PAIRS_MAX} pairs of queues, not {0}")]
    Pairs(usize),
    /// What should be a TAP interface.
    #[error("descriptor {number} is not a queue of a TAP interface")]
    NotATap {
        /// Among those of this device.
        number: usize,
        /// What the kernel says.
        #[source]
        source: io::Error,
    },
    /// Made without what the device needs.
    #[error(
        "the TAP interface of descriptor {number} needs the flags {needed} (it has {flags:#06x})"
    )]
    TapFlags {
        /// Among those of this device.
        number: usize,
        /// What is missing.
        needed: &'static str,
        /// What it has.
        flags: u16,
    },
    /// What passt should answer on.
    #[error("the socket of passt can't be used")]
    Passt(#[source] io::Error),
    /// No poll set or event descriptor.
    #[error("cannot make what the network device's threads wait on")]
    Poll(#[source] io::Error),
}
