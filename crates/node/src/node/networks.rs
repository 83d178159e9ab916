//! Networks and network policies.

use super::Node;
use jiffy_content::error::{Error, Result};
use jiffy_content::model::vm::Spec;
use jiffy_content::names;
use jiffy_vmhost::handle::Command;
use jiffy_vmhost::network::{DEFAULT, check_policy, mac_of};
use jiffy_wire::api::{Action, Network, NetworkPolicy, Subject, Vm};
use std::sync::Arc;

impl Node {
    /// How VMs have a network if not by links and rules of this host, as a sentence.
    pub fn network_note(&self) -> Option<String> {
        self.host.network.note()
    }

    /// All networks, the default one first.
    pub fn networks(&self) -> Vec<Network> {
        let names = self.host.network.names();
        [DEFAULT.to_owned()]
            .into_iter()
            .chain(names)
            .map(|name| self.describe(name))
            .collect()
    }

    /// One network.
    ///
    /// # Errors
    ///
    /// If there is none, or VMs have no networks here.
    pub fn network_named(&self, name: &str) -> Result<Network> {
        if name != DEFAULT {
            self.host.network.check_name(name)?;
        }
        Ok(self.describe(name.to_owned()))
    }

    /// Makes a network.
    ///
    /// # Errors
    ///
    /// If the name is not valid or taken, VMs have no networks here, or the list can't be written.
    pub fn create_network(&self, name: &str) -> Result<Network> {
        self.host.network.create(name)?;
        self.host
            .events
            .publish(Subject::Network, Action::Created, name);
        Ok(self.describe(name.to_owned()))
    }

    /// Removes a network that no VM is in.
    ///
    /// # Errors
    ///
    /// If there is none, a VM is in it, it is one that can't be removed, the list can't be written,
    /// or the kernel refuses.
    pub fn remove_network(&self, name: &str) -> Result<()> {
        let vms = self.vms_in(name);
        if name != DEFAULT && !vms.is_empty() {
            return Err(Error::conflict(format!(
                "The network {name} is used by {}.",
                vms.join(", ")
            ))
            .hint("Remove these VMs first."));
        }
        self.host.network.remove(name)?;
        self.host
            .events
            .publish(Subject::Network, Action::Removed, name);
        Ok(())
    }

    /// Changes a VM's network policy, also while it runs.
    ///
    /// # Errors
    ///
    /// If there is no such VM, it has no network, a rule is not valid, or the kernel refuses.
    pub async fn change_policy(&self, wanted: &str, policy: NetworkPolicy) -> Result<Vm> {
        let vm = self.find(wanted)?;
        if vm.spec.network.is_none() {
            return Err(Error::wrong_state(format!(
                "The VM {} has no network.",
                vm.name
            )));
        }
        check_policy(&policy)?;
        vm.ask(|reply| Command::Policy(Box::new(policy), reply))
            .await??;
        vm.ask(Command::Save).await??;
        Ok(vm.vm())
    }

    /// An id for a VM that is about to start; if it needs a link, the id of a prepared link. A run
    /// that has to wait in the queue takes no prepared link.
    pub(super) fn new_id(&self, spec: &Spec) -> String {
        let starts = !self.host.room.has_waiting();
        let ahead = spec.network.as_ref().filter(|_| starts);
        let ahead = ahead.and_then(|_| self.host.network.take_prepared_link());
        ahead.unwrap_or_else(names::new_id)
    }

    /// A VM with all details.
    ///
    /// # Errors
    ///
    /// As in [`Node::find_any`].
    pub async fn inspect(self: &Arc<Self>, wanted: &str) -> Result<Vm> {
        let found = self.find_any(wanted)?;
        self.check_sleepers(std::slice::from_ref(&found)).await?;
        let mut vm = self.shown(&found);
        if let Some(network) = &mut vm.network
            && !network.addresses.is_empty()
        {
            network.mac = mac_of(&vm.id).ok().map(|mac| mac.to_string());
            network.counters = self.host.network.counters(&vm.id);
        }
        vm.queued = self.host.room.queued_for(&vm.id);
        Ok(vm)
    }

    fn describe(&self, name: String) -> Network {
        let network = &self.host.network;
        Network {
            vms: self.vms_in(&name),
            name,
            ranges: network.ranges(),
            error: network
                .why_not()
                .map(|why| format!("VMs have no network on this host: {why}.")),
            note: network.note(),
            warnings: network.blockers(),
        }
    }

    fn vms_in(&self, network: &str) -> Vec<String> {
        let mut all = self.registry.all();
        all.retain(|vm| {
            let own = vm.spec.network.as_ref();
            !vm.spec.hidden && own.and_then(|it| it.name.as_deref()) == Some(network)
        });
        all.iter().map(|vm| vm.name.clone()).collect()
    }
}
