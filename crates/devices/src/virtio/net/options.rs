//! What a network device is made from.

use super::{Backend, PAIRS_MAX};
use crate::virtio::queue::RateLimit;
use std::fmt;
use std::io;
use thiserror::Error;

/// The address of a network interface.
#[derive(Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Mac(pub [u8; 6]);

impl fmt::Display for Mac {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, f] = self.0;
        write!(formatter, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}")
    }
}

impl fmt::Debug for Mac {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

/// What a network device is made from.
#[derive(Debug)]
pub struct NetArgs {
    /// The guest's address, of one interface and not zero.
    pub mac: Mac,
    /// Largest packet without Ethernet header, bytes; none leaves it to the driver (1500).
    pub mtu: Option<u16>,
    /// What the guest may receive at most; an operation is a frame, and a frame of segments
    /// is one.
    pub receive_limit: RateLimit,
    /// What it may send.
    pub send_limit: RateLimit,
    /// Where frames go; as many pairs of queues as it has.
    pub backend: Backend,
}

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

impl NetArgs {
    /// Whether all of it can be; the backend has been looked at.
    pub(super) fn check(&self) -> Result<(), NetError> {
        const GROUP: u8 = 1;
        if self.mac.0[0] & GROUP != 0 || self.mac.0 == [0; 6] {
            return Err(NetError::Mac(self.mac));
        }
        match self.mtu {
            Some(mtu) if mtu < 68 => Err(NetError::Mtu(mtu)),
            _ => Ok(()),
        }
    }
}
