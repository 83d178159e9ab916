//! The options of a network device.

use super::Backend;
use super::error::NetError;
use super::guard::Guard;
use super::mac::Mac;
use crate::virtio::queue::RateLimit;

/// The options of a network device.
#[derive(Debug)]
pub struct NetArgs {
    /// The guest's address: unicast, and not zero.
    pub mac: Mac,
    /// Largest packet without Ethernet header, bytes; `None` leaves it to the driver (1500).
    pub mtu: Option<u16>,
    /// Limit of what the guest receives. An operation is a frame; a frame of several segments
    /// counts as one.
    pub receive_limit: RateLimit,
    /// Limit of what the guest sends.
    pub send_limit: RateLimit,
    /// Which frames the guest may send; `None` leaves that to the host's rules.
    pub guard: Option<Guard>,
    /// Sends and receives the frames; the device has as many queue pairs as it has queues.
    pub backend: Backend,
}

impl NetArgs {
    /// Checks the options; the backend was checked already.
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
