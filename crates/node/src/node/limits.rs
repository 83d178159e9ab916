//! Changes of a VM's rate limits.

use super::Node;
use jiffy_content::error::{Error, Result};
use jiffy_content::model::vm::Spec;
use jiffy_vmhost::handle::{Command, DeviceLimits, VmHandle};
use jiffy_wire::api::{Limits, NetworkUse, Vm, VmState};
use jiffy_wire::vmm::ControlRequest;
use std::sync::Arc;

impl Node {
    /// Changes a VM's rate limits, at once if it runs.
    pub async fn change_limits(self: Arc<Self>, wanted: String, limits: Limits) -> Result<Vm> {
        let vm = self.find(&wanted)?;
        check(&vm, &limits)?;
        let _one = self.operate_for_client(&vm).await?;
        let changed = vm.ask(|reply| Command::Limits(Box::new(limits), reply));
        let DeviceLimits { disks, nets } = changed.await??;
        vm.ask(Command::Save).await??;
        let view = vm.when(|view| view.vm.state != VmState::Starting).await;
        if view.is_active() {
            let order = ControlRequest::SetLimits { disks, nets };
            let told = self.order(&vm, "limited", order).await;
            // One that ends meanwhile needs none.
            if let Err(error) = told
                && vm.view.borrow().is_active()
            {
                return Err(error.hint("The limits are kept: they hold from its next start on."));
            }
        }
        Ok(vm.vm())
    }
}

/// What a VM is made of, with the limits that it has now: what its children have.
pub(super) fn current_spec(vm: &VmHandle) -> Spec {
    let now = &vm.view.borrow().vm;
    Spec {
        disks: now.disks.clone(),
        root_limit: now.limits.root.unwrap_or_default(),
        network: vm.spec.network.clone().map(|network| NetworkUse {
            limit: now.limits.network.unwrap_or_default(),
            ..network
        }),
        ..(*vm.spec).clone()
    }
}

fn check(vm: &VmHandle, limits: &Limits) -> Result<()> {
    let name = &vm.name;
    if limits.is_default() {
        return Err(Error::invalid(format!(
            "No limit of the VM {name} is to change."
        )));
    }
    let has = |volume: &String| vm.spec.disks.iter().any(|disk| disk.name == *volume);
    if let Some(other) = limits.volumes.keys().find(|volume| !has(volume)) {
        return Err(Error::not_found(format!(
            "The VM {name} has no volume {other}."
        )));
    }
    if limits.network.is_some() && vm.spec.network.is_none() {
        return Err(Error::wrong_state(format!("The VM {name} has no network.")));
    }
    Ok(())
}
