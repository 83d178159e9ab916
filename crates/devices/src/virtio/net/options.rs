//! What a network device is made from.

use super::Backend;
use super::error::NetError;
use super::mac::Mac;
use crate::virtio::queue::RateLimit;

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
