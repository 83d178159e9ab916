//! Changes of a VM's rate limits, number of vCPUs and memory.

use super::{Node, balloon};
use jiffy_content::checks::memory_range;
use jiffy_content::error::{Error, Result};
use jiffy_content::model::vm::Spec;
use jiffy_content::room::memory::{Amount, Reserved, vcpus};
use jiffy_sys::causes;
use jiffy_vmhost::handle::{Command, DeviceLimits, VmHandle};
use jiffy_vmhost::{agent, control};
use jiffy_wire::agent::{CPUS, Request};
use jiffy_wire::api::{Limits, NetworkUse, Purpose, Vm, VmState};
use jiffy_wire::vmm::{ControlRequest, ControlResponse, MemoryStatus};
use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep};
use tracing::warn;

/// How long a guest has to bring its vCPUs on or off line.
const ANSWER_TIME: Duration = Duration::from_secs(60);
/// How often the memory of a guest is read that gives some back or takes some.
const POLL: Duration = Duration::from_millis(10);
/// Most polls without a further MiB. Counted instead of timed, so that a stall of the whole host
/// does not count. Linux pauses for 200 ms when it finds no free memory.
const IDLE_POLLS: u32 = 500;
/// Most times that a guest is asked what it can spare: it may be taking back its caches' memory.
const SPARE_POLLS: u32 = 50;
/// How long it has for all these answers.
const SPARE_TIME: Duration = Duration::from_secs(10);
/// How long a guest has in all.
const MEMORY_TIME: Duration = Duration::from_secs(600);

impl Node {
    /// Changes a VM's limits; if it runs, they apply at once.
    ///
    /// # Errors
    ///
    /// If there is no such VM, a limit is not valid for it, there is no room for more memory, or
    /// its guest or VMM refuses. If only the VMM refuses new rates, they are stored for the next
    /// start.
    pub async fn change_limits(self: Arc<Self>, wanted: String, limits: Limits) -> Result<Vm> {
        let vm = self.find(&wanted)?;
        check(&vm, &limits)?;
        let _one = self.operate_for_client(&vm).await?;
        if let Some(cpus) = limits.cpus {
            self.change_cpus(&vm, cpus).await?;
        }
        if let Some(mib) = limits.memory_mib {
            self.change_memory(&vm, mib).await?;
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
        bring_online(vm, &socket, before, cpus).await
    }

    /// Changes the memory that programs may use, at once if the VM runs. More is reserved before the
    /// guest gets it; less is given back to the ledger when the guest has given it up.
    async fn change_memory(&self, vm: &VmHandle, mib: u32) -> Result<()> {
        let view = vm.when(|view| view.vm.state != VmState::Starting).await;
        if !view.lives() {
            return take_over(vm, mib, None).await;
        }
        // Its guest must run.
        let agent = self.agent_socket(vm).await?;
        let before = view.vm.memory_mib;
        if mib <= before {
            return self.shrink(vm, &agent, before, mib).await;
        }
        let amount = Amount::of_growth(mib - before);
        let more = self.reserve(vm, Purpose::Grow, amount, 1).await?;
        take_over(vm, mib, Some(more)).await?;
        if let Err(error) = self.order(vm, "given memory", set(mib)).await {
            take_over(vm, before, None).await?;
            return Err(error);
        }
        self.has_taken(vm, mib).await
    }

    /// Waits until a guest has taken the memory that it was given.
    async fn has_taken(&self, vm: &VmHandle, mib: u32) -> Result<()> {
        match self.memory_within(vm, mib..=u32::MAX).await? {
            used if used >= mib => Ok(()),
            used => Err(Error::vm_failed(format!(
                "The VM {} may use {mib} MiB of memory, but its guest has taken only {used} MiB so far.",
                vm.name
            ))),
        }
    }

    /// Has a guest give back its memory above this many MiB. After an error it has all of it again.
    async fn shrink(&self, vm: &VmHandle, agent: &Path, before: u32, mib: u32) -> Result<()> {
        // Its caches give way to the change.
        self.deflate_squeezed(vm).await;
        can_spare(vm, agent, before, before - mib).await?;
        self.order(vm, "shrunk", set(mib)).await?;
        let used = self.memory_within(vm, 0..=mib).await;
        if used.as_ref().is_ok_and(|used| *used <= mib) {
            return take_over(vm, mib, None).await;
        }
        self.order(vm, "given its memory again", set(before))
            .await?;
        let used = used?;
        let why = format!("its guest still used {used} MiB when it gave nothing more back");
        Err(keeps(vm, before, &why))
    }

    /// A VM whose memory or vCPUs were changed after its snapshot was made ([`is_resized`]) has just
    /// begun: when it is ready, it gets what its record says. If that fails, its record says what it
    /// has.
    pub(super) async fn resize_restored(self: Arc<Self>, vm: Arc<VmHandle>) {
        let _one = vm.operate().await;
        let Ok(agent) = self.agent_socket(&vm).await else {
            return;
        };
        let now = vm.vm();
        if let Err(error) = self.resize_memory(&vm, &agent, now.memory_mib).await {
            warn!(vm = %vm.name, %error, "a restored VM does not have the memory that was chosen for it");
        }
        if let Err(error) = resize_cpus(&vm, &agent, now.cpus).await {
            warn!(vm = %vm.name, %error, "a restored VM does not have the vCPUs that were chosen for it");
        }
    }

    async fn resize_memory(&self, vm: &VmHandle, agent: &Path, mib: u32) -> Result<()> {
        let captured = vm.spec.memory_mib;
        if mib > captured {
            // It is reserved since the start.
            self.order(vm, "given memory", set(mib)).await?;
            return self.has_taken(vm, mib).await;
        }
        if mib < captured
            && let Err(error) = self.shrink(vm, agent, captured, mib).await
        {
            take_over(vm, captured, None).await?;
            return Err(error);
        }
        Ok(())
    }

    /// Waits until the memory of a guest, MiB, is in this range, or comes no nearer; returns it.
    async fn memory_within(&self, vm: &VmHandle, range: RangeInclusive<u32>) -> Result<u32> {
        let socket = self.host.paths.control_socket(&vm.id);
        let until = Instant::now() + MEMORY_TIME;
        let (mut nearest, mut idle_polls) = (None, 0);
        loop {
            let asked = control::request(&socket, ControlRequest::Memory).await;
            let Ok(ControlResponse::Memory(MemoryStatus { used_mib, .. })) = asked else {
                return Err(Error::vm_failed(format!(
                    "The VMM of {} no longer tells what memory its guest uses.",
                    vm.name
                )));
            };
            let far = used_mib.abs_diff(used_mib.clamp(*range.start(), *range.end()));
            let is_nearer = nearest.is_none_or(|nearest| far < nearest);
            idle_polls = if is_nearer { 0 } else { idle_polls + 1 };
            if is_nearer {
                nearest = Some(far);
            }
            if far == 0 || idle_polls > IDLE_POLLS || Instant::now() > until {
                return Ok(used_mib);
            }
            sleep(POLL).await;
        }
    }
}

/// Was the memory or the number of vCPUs of this VM changed after the snapshot was made that each of
/// its starts restores?
pub(super) fn is_resized(vm: &VmHandle) -> bool {
    let now = &vm.view.borrow().vm;
    let (spec, now) = (&vm.spec, (now.memory_mib, now.cpus));
    spec.from.is_some() && now != (spec.memory_mib, spec.cpus)
}

async fn resize_cpus(vm: &VmHandle, agent: &Path, cpus: u8) -> Result<()> {
    let captured = vm.spec.cpus;
    if cpus == captured {
        return Ok(());
    }
    bring_online(vm, agent, captured, cpus).await
}

/// Has a guest bring vCPUs on or off line; after an error it has as many as before. Its record then
/// has the number that it has.
async fn bring_online(vm: &VmHandle, agent: &Path, before: u8, cpus: u8) -> Result<()> {
    let request = Request::SetCpus {
        version: CPUS,
        count: cpus.into(),
    };
    let told = agent::tell(agent, &request, ANSWER_TIME).await;
    let online = if told.is_ok() { cpus } else { before };
    change(vm, of_cpus(online)).await?;
    told.map_err(|why| {
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

fn set(usable_mib: u32) -> ControlRequest {
    ControlRequest::SetMemory { usable_mib }
}

/// Checks that a guest can do without this much of its memory, MiB. A balloon that is to take more
/// leaves it without free memory until the change is given up, and its kernel ends programs for it.
async fn can_spare(vm: &VmHandle, agent: &Path, before: u32, less: u32) -> Result<()> {
    let until = Instant::now() + SPARE_TIME;
    let mut polls = 0;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let spare = match balloon::spare_within(agent, 0, left).await {
            Ok(spare) => spare.all,
            Err(error) => return Err(kept(vm, before, &causes::sentence(&error))),
        };
        if spare >= less {
            return Ok(());
        }
        polls += 1;
        if polls > SPARE_POLLS || Instant::now() > until {
            let why = format!("its guest can do without {spare} MiB, not without {less}");
            return Err(keeps(vm, before, &why));
        }
        sleep(POLL).await;
    }
}

fn keeps(vm: &VmHandle, mib: u32, why: &str) -> Error {
    kept(vm, mib, why).hint("Its programs need that memory, or its kernel has no balloon driver.")
}

fn kept(vm: &VmHandle, mib: u32, why: &str) -> Error {
    let name = &vm.name;
    Error::vm_failed(format!(
        "The VM {name} keeps its {mib} MiB of memory: {why}."
    ))
}

fn of_cpus(cpus: u8) -> Limits {
    Limits {
        cpus: Some(cpus),
        ..Limits::default()
    }
}

/// Has the VM's task take over the memory that programs may use, with what was reserved for more.
async fn take_over(vm: &VmHandle, mib: u32, more: Option<Reserved>) -> Result<()> {
    let taken = vm.ask(|reply| Command::Memory(mib, more.map(Box::new), reply));
    taken.await?
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
        memory_mib: now.memory_mib,
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
    limits
        .memory_mib
        .map_or(Ok(()), |mib| check_memory(vm, mib))
}

fn check_memory(vm: &VmHandle, mib: u32) -> Result<()> {
    let name = &vm.name;
    let why = match vm.spec.max_memory_mib.map(memory_range) {
        Some(range) if range.contains(&mib) => return Ok(()),
        Some(range) => format!("it can have {} to {} MiB", range.start(), range.end()),
        None => format!("it always has {} MiB", vm.spec.memory_mib),
    };
    Err(Error::invalid(format!(
        "The VM {name} can't have {mib} MiB of memory; {why}."
    ))
    .hint("`jiffy run --max-memory` says how much a new VM may have while it runs."))
}
