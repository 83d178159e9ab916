//! What a snapshot keeps of the socket device.

use super::CONNECTION_LIMIT;
use super::error::{VsockError, check_cid};
use serde::{Deserialize, Serialize};

/// A saved socket device. Connections are not restored, because their host programs belong to the
/// saved VM. The restored device tells the guest so, with a transport reset event (Virtio 1.3
/// §5.10.6.7) and a RST for each.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VsockState {
    /// The guest's context id. A restored VM may get another one, which the guest reads on the
    /// reset event.
    pub cid: u64,
    /// The connections that the guest knew.
    pub connections: Vec<SavedConnection>,
}

/// The ports of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedConnection {
    /// The port on the host.
    pub host_port: u32,
    /// The port in the guest.
    pub guest_port: u32,
}

impl VsockState {
    /// Checks that a device could have saved this state.
    ///
    /// # Errors
    ///
    /// If there are more connections than a device has, or if the context id is reserved.
    pub fn check(&self) -> Result<(), VsockError> {
        if self.connections.len() > 2 * CONNECTION_LIMIT {
            return Err(VsockError::SavedConnections(self.connections.len()));
        }
        check_cid(self.cid)
    }
}
