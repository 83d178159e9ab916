//! Changes of a VM's network policy while it runs.

use crate::task::actor::Actor;
use jiffy_content::error::Result;
use jiffy_wire::api::NetworkPolicy;

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
}
