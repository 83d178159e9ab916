//! Published ports of VMs in the machine: this host's ports lead to the machine's.

use super::Context;
use crate::client::Client;
use crate::failure::Result;
use crate::place::machine;
use jiffy_machine::Forward;
use jiffy_wire::api::{Vm, VmState};
use std::collections::BTreeSet;

impl Context {
    /// Has the ports of all VMs that there are, and these, lead to the machine; nothing where
    /// VMs run on this host itself.
    pub async fn forward_ports(&self, client: &Client, more: &[String]) -> Result<()> {
        if !self.in_machine() {
            return Ok(());
        }
        let vms: Vec<Vm> = client.get("/v1/vms?all=true").await?;
        machine::forward(&self.folders, &wanted(&vms, None, more))
    }

    /// The same after a verb that is done: what fails does not undo it. The VM that is
    /// `over` may be on its way out.
    pub async fn forward_ports_after(&self, client: &Client, over: Option<&str>) {
        if !self.in_machine() {
            return;
        }
        let forwarded = async {
            let vms: Vec<Vm> = client.get("/v1/vms?all=true").await?;
            machine::forward(&self.folders, &wanted(&vms, over, &[]))
        };
        if let Err(failure) = forwarded.await {
            failure.report();
        }
    }
}

/// Ports of VMs that run or sleep, but for one, and these.
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
