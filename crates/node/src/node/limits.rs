//! Changes of a VM's rate limits and number of vCPUs.

use super::Node;
use jiffy_content::error::{Error, Result};
use jiffy_content::model::vm::Spec;
use jiffy_content::room::memory::vcpus;
use jiffy_vmhost::agent;
use jiffy_vmhost::handle::{Command, DeviceLimits, VmHandle};
use jiffy_wire::agent::{CPUS, Request};
use jiffy_wire::api::{Limits, NetworkUse, Vm, VmState};
use jiffy_wire::vmm::ControlRequest;
use std::sync::Arc;
use std::time::Duration;

/// How long a guest has to bring its vCPUs on or off line.
const ANSWER_TIME: Duration = Duration::from_secs(60);

impl Node {
    /// Changes a VM's limits; if it runs, they apply at once.
    pub async fn change_limits(self: Arc<Self>, wanted: String, limits: Limits) -> Result<Vm> {
        let vm = self.find(&wanted)?;
        check(&vm, &limits)?;
        let _one = self.operate_for_client(&vm).await?;
        if let Some(cpus) = limits.cpus {
            self.change_cpus(&vm, cpus).await?;
        }
        let DeviceLimits { disks, nets } = change(&vm, limits).await?;
        vm.ask(Command::Save).await??;
        let view = vm.when(|view| view.vm.state != VmState::Starting).await;
        if view.is_active() {
            let order = ControlRequest::SetLimits { disks, nets };
            let told = self.order(&vm, "limited", order).await;
            // A VM that ends meanwhile needs no new limits.
            if let Err(error) = told
                && vm.view.borrow().is_active()
            {
                return Err(
                    error.hint("The new limits are stored and apply from its next start on.")
                );
            }
        }
        Ok(vm.vm())
    }

    /// Brings vCPUs on or off line, at once if the VM runs.
    async fn change_cpus(&self, vm: &VmHandle, cpus: u8) -> Result<()> {
        let view = vm.when(|view| view.vm.state != VmState::Starting).await;
        if !view.lives() {
            change(vm, of_cpus(cpus)).await?;
            return Ok(());
        }
        let socket = self.agent_socket(vm).await?;
        let before = view.vm.cpus;
        // More vCPUs are reserved before they go online.
        change(vm, of_cpus(cpus.max(before))).await?;
        let request = Request::SetCpus {
            version: CPUS,
            count: cpus.into(),
        };
        let answer = agent::tell(&socket, &request, ANSWER_TIME).await;
        let online = if answer.is_ok() { cpus } else { before };
        change(vm, of_cpus(online)).await?;
        answer.map_err(|why| {
            Error::vm_failed(format!(
                "The VM {} keeps its {}: {why}.",
                vm.name,
                vcpus(before.into())
            ))
            .hint(
                "The number of vCPUs of a guest that an older release booted can't be changed until it boots again.",
            )
        })
    }
}

fn of_cpus(cpus: u8) -> Limits {
    Limits {
        cpus: Some(cpus),
        ..Limits::default()
    }
}

/// Has the VM's task take over limits; the result is what its devices have now.
async fn change(vm: &VmHandle, limits: Limits) -> Result<DeviceLimits> {
    let changed = vm.ask(|reply| Command::Limits(Box::new(limits), reply));
    changed.await?
}

/// What a VM is made of, with the limits and the network policy that it has now: what its children
/// and snapshots have.
pub(super) fn current_spec(vm: &VmHandle) -> Spec {
    let now = &vm.view.borrow().vm;
    Spec {
        cpus: now.cpus,
        max_cpus: vm.spec.vcpus_beyond(now.cpus),
        disks: now.disks.clone(),
        root_limit: now.limits.root.unwrap_or_default(),
        network: vm.spec.network.clone().map(|network| NetworkUse {
            limit: now.limits.network.unwrap_or_default(),
            policy: match &now.network {
                Some(current) => current.policy.clone(),
                None => network.policy,
            },
            ..network
        }),
        ..(*vm.spec).clone()
    }
}

fn check(vm: &VmHandle, limits: &Limits) -> Result<()> {
    let name = &vm.name;
    if limits.is_default() {
        return Err(Error::invalid(format!(
            "The request contains no limit of the VM {name}."
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
    let most = vm.spec.vcpus();
    if let Some(cpus) = limits.cpus
        && !(1..=most).contains(&cpus)
    {
        return Err(Error::invalid(format!(
            "The VM {name} can't have {cpus} vCPUs; it can have 1 to {most}."
        ))
        .hint("`jiffy run --max-cpus` says how many a new VM may have while it runs."));
    }
    Ok(())
}
