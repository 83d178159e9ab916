//! Published ports of VMs in the machine: ports of this host are forwarded to the machine.

use super::Context;
use super::context::each;
use crate::client::Client;
use crate::failure::{Outcome, Result};
use crate::place::machine;
use jiffy_machine::Forward;
use jiffy_wire::api::{Vm, VmState};
use std::collections::BTreeSet;

impl Context {
    /// Forwards the ports of all VMs, and `more`, to the machine. Does nothing where VMs run on
    /// this host itself.
    pub async fn forward_ports(&self, client: &Client, more: &[String]) -> Result<()> {
        self.forward(client, None, more).await
    }

    /// Forwards the ports of all VMs after a verb has succeeded: a failure is only reported. The
    /// ports of the VM `over`, which has ended but may still be listed, are not forwarded.
    pub async fn forward_ports_after(&self, client: &Client, over: Option<&str>) {
        if let Err(failure) = self.forward(client, over, &[]).await {
            failure.report();
        }
    }

    /// [`each`] for verbs that start or end VMs: updates the forwarded ports afterwards.
    pub async fn each_with_ports(
        &self,
        client: &Client,
        vms: &[String],
        act: impl AsyncFnMut(&str) -> Result<()>,
    ) -> Result<Outcome> {
        let outcome = each(vms, act).await;
        self.forward_ports_after(client, None).await;
        outcome
    }

    async fn forward(&self, client: &Client, over: Option<&str>, more: &[String]) -> Result<()> {
        if !self.in_machine() {
            return Ok(());
        }
        let vms: Vec<Vm> = client.get("/v1/vms?all=true").await?;
        machine::forward(&self.folders, &wanted(&vms, over, more))
    }
}

/// The ports of running and hibernated VMs, except `over`, and `more`.
fn wanted(vms: &[Vm], over: Option<&str>, more: &[String]) -> BTreeSet<Forward> {
    let lives = |vm: &&Vm| {
        let ended = matches!(vm.state, VmState::Created | VmState::Exited);
        !ended && over != Some(vm.id.as_str())
    };
    let ports = vms
        .iter()
        .filter(lives)
        .filter_map(|vm| vm.network.as_ref());
    let ports = ports.flat_map(|network| &network.ports).chain(more);
    ports.flat_map(|port| Forward::of_published(port)).collect()
}
