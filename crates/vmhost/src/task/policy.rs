//! Changes of a VM's network policy and limits while it runs.

use crate::handle::DeviceLimits;
use crate::jails::{capture_headroom, memory_limit};
use crate::task::actor::Actor;
use jiffy_content::error::Result;
use jiffy_content::room::memory::Reserved;
use jiffy_wire::api::{Action, Limits, NetworkPolicy};
use tracing::warn;

impl Actor {
    /// Applies a new network policy from now on.
    pub(super) fn change_policy(&mut self, policy: NetworkPolicy) -> Result<()> {
        let before = self.record.policy.replace(policy);
        let changed = self.host.network.change(&self.record);
        match changed {
            Ok(()) => self.updated(),
            Err(_) => self.record.policy = before,
        }
        changed
    }

    /// Changes limits from the next start on. The caller must tell the VMM, and the guest if the
    /// number of vCPUs changes.
    pub(super) fn change_limits(&mut self, limits: Limits) -> Result<DeviceLimits> {
        if let Some(cpus) = limits.cpus {
            self.change_share(cpus)?;
        }
        if !limits.is_default() {
            self.record.limits.change(limits);
            self.updated();
        }
        Ok(DeviceLimits {
            disks: self.record.disk_limits(),
            nets: self.record.network_limit().into_iter().collect(),
        })
    }

    /// Changes the memory that its programs may use, in the ledger, in the VMM's control group and
    /// from the next start on. `more` is what was reserved for a running VM that grows.
    pub(super) fn change_memory(&mut self, mib: u32, more: Option<Reserved>) {
        self.record.limits.memory_mib = Some(mib);
        if let Some(running) = self.phase.running_mut() {
            match (&mut running.room, more) {
                (Some(room), Some(more)) => room.add(more),
                (Some(room), None) => room.shrink_memory(mib.into()),
                (None, _) => {}
            }
            let limit = memory_limit(&self.record, mib);
            let headroom = capture_headroom(&self.record);
            if let Err(error) = running.process.set_memory_limit(limit, headroom) {
                warn!(vm = %self.record.name, %error, "the VMM's memory limit can't be changed");
            }
        }
        self.updated();
    }

    fn updated(&mut self) {
        self.changed();
        self.host.events.publish_vm(Action::Updated, &self.record);
    }

    /// Changes how many processors a VM with a VMM may use. The guest's kernel can bring up all of
    /// its vCPUs by itself; the VMM's control group keeps it to this number.
    fn change_share(&mut self, cpus: u8) -> Result<()> {
        let Some(running) = self.phase.running_mut() else {
            return Ok(());
        };
        if let Some(room) = &mut running.room {
            room.set_cpus(cpus.into())?;
        }
        if let Err(error) = running.process.set_processors(cpus.into()) {
            warn!(vm = %self.record.name, %error, "the VMM's share of the processors can't be changed");
        }
        Ok(())
    }
}
