//! Errors of network devices.

use super::PAIRS_MAX;
use super::mac::Mac;
use std::io;
use thiserror::Error;

/// Why a network device could not be created.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum NetError {
    /// The MAC address is a multicast address or zero.
    #[error("{0} is not a unicast MAC address")]
    Mac(Mac),
    /// The MTU is out of range (Virtio 1.3 §5.1.4.1).
    #[error("an MTU of {0} bytes is outside of 68 to 65535")]
    Mtu(u16),
    /// The number of queue pairs is zero or too large.
    #[error("a network device has 1 to {PAIRS_MAX} pairs of queues, not {0}")]
    Pairs(usize),
    /// A descriptor is not a queue of a TAP interface.
    #[error("descriptor {number} is not a queue of a TAP interface")]
    NotATap {
        /// Its index among the device's descriptors.
        number: usize,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// A TAP interface lacks a flag that the device needs.
    #[error(
        "the TAP interface of descriptor {number} needs the flags {needed} (it has {flags:#06x})"
    )]
    TapFlags {
        /// Its index among the device's descriptors.
        number: usize,
        /// The missing flag.
        needed: &'static str,
        /// Its flags.
        flags: u16,
    },
    /// The socket of passt can't be used.
    #[error("the socket of passt can't be used")]
    Passt(#[source] io::Error),
    /// A poll set or event descriptor could not be created.
    #[error("cannot create the poll set or an event descriptor of the network device")]
    Poll(#[source] io::Error),
}
