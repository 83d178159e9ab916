//! Changes of a VM's network policy and rate limits while it runs.

use crate::handle::DeviceLimits;
use crate::task::actor::Actor;
use jiffy_content::error::Result;
use jiffy_wire::api::{Limits, NetworkPolicy};

impl Actor {
    /// Applies a new network policy from now on.
    pub(super) fn change_policy(&mut self, policy: NetworkPolicy) -> Result<()> {
        let before = self.record.policy.replace(policy);
        let changed = self.host.network.change(&self.record);
        match changed {
            Ok(()) => self.changed(),
            Err(_) => self.record.policy = before,
        }
        changed
    }

    /// Changes limits from the next start on. The caller must tell the VMM if the VM runs.
    pub(super) fn change_limits(&mut self, limits: Limits) -> DeviceLimits {
        self.record.limits.change(limits);
        self.changed();
        DeviceLimits {
            disks: self.record.disk_limits(),
            nets: self.record.network_limit().into_iter().collect(),
        }
    }
}
