//! Hibernates or stops VMs that nobody uses.
//!
//! One timer checks all running VMs that have an idle time; if there is none, the daemon does not
//! wake up.

use super::Node;
use super::operation::Stopwatch;
use crate::idle::sample::Sample;
use crate::idle::watch::Watch;
use jiffy_content::clock::monotonic_ns;
use jiffy_content::error::Result;
use jiffy_sys::priority::AWAITED;
use jiffy_vmhost::handle::{Command, VmHandle};
use jiffy_vmhost::network;
use jiffy_vmhost::task::DEFAULT_GRACE;
use jiffy_wire::api::{IdleAction, IdlePolicy, VmState};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};

/// Checks per idle time, so that a VM is hibernated at most a tenth of it too late.
const LOOKS: u32 = 10;
/// Shortest and longest time between two checks.
const SHORTEST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(10);
/// VMs that are hibernated or stopped at a time: other VMs need the disk, too.
const AT_ONCE: usize = 2;

/// Watches all VMs with an idle time.
pub(super) async fn watch_vms(node: Arc<Node>) {
    let places = Arc::new(Semaphore::new(AT_ONCE));
    let mut events = node.host.events.subscribe();
    loop {
        events.skip();
        let running = node.running();
        let runs = |id: &String| running.iter().any(|vm| vm.id == *id);
        node.watches.lock().retain(|id, _| runs(id));
        let vms: Vec<_> = running.into_iter().filter_map(with_idle_policy).collect();
        let Some(shortest) = vms.iter().map(|(_, policy)| idle_time(policy)).min() else {
            events.vm_runs().await;
            continue;
        };
        for Idle { vm, policy, .. } in find_idle(&node, vms).await {
            if !node.watches.claim(&vm.id) {
                continue;
            }
            let (node, places) = (Arc::clone(&node), Arc::clone(&places));
            tokio::spawn(async move {
                let _place = places.acquire_owned().await;
                node.hibernate_or_stop(vm, policy, AWAITED).await;
            });
        }
        // A VM that begins to run may have a shorter idle time.
        let pause = (shortest / LOOKS).clamp(SHORTEST, LONGEST);
        sleep(SHORTEST).await;
        let _ = timeout(pause - SHORTEST, events.vm_runs()).await;
    }
}

/// A VM that was idle long enough.
pub(super) struct Idle {
    pub(super) vm: Arc<VmHandle>,
    pub(super) policy: IdlePolicy,
    /// How long it was idle.
    pub(super) idle: Duration,
}

/// Samples each VM; returns those that were idle long enough, except VMs that are being hibernated
/// or stopped already, or for which that has just failed.
pub(super) async fn find_idle(
    node: &Arc<Node>,
    vms: Vec<(Arc<VmHandle>, IdlePolicy)>,
) -> Vec<Idle> {
    let node = Arc::clone(node);
    let looked = tokio::task::spawn_blocking(move || {
        let traffic = match vms.iter().any(|(vm, _)| vm.spec.network.is_some()) {
            true => network::traffic(),
            false => HashMap::new(),
        };
        let mut due = Vec::new();
        let mut open = None;
        for (vm, policy) in vms {
            let pid = vm.view.borrow().vm.pid;
            let bytes = traffic.get(&vm.id).copied().unwrap_or(0);
            // A VM that can't be measured is left alone.
            let sample = |pid| Sample::of(pid, &node.launcher().helpers(pid), bytes);
            let Some(sample) = pid.and_then(sample) else {
                continue;
            };
            let mut watches = node.watches.lock();
            let watch = watches
                .entry(vm.id.clone())
                .or_insert_with(|| Watch::new(monotonic_ns()));
            // A halted VM would work if it could.
            let is_used = !vm.activity.in_words().is_empty() || node.pressure.is_halted(&vm.id);
            watch.take(sample, is_used, vm.activity.last_ns());
            let now_ns = monotonic_ns();
            // Counted only if needed, because it reads all connections of the host.
            let counts = watch.was_connected() || watch.is_due(now_ns, idle_time(&policy));
            if counts && has_published_ports(&vm) {
                let open = open.get_or_insert_with(|| node.host.network.open_connections());
                let count = open
                    .as_ref()
                    .map(|open| open.get(&vm.id).copied().unwrap_or(0));
                watch.connected(now_ns, count);
                if count.is_none() {
                    continue;
                }
            }
            if watch.is_due(now_ns, idle_time(&policy)) {
                let idle = watch.idle(now_ns, vm.activity.last_ns());
                drop(watches);
                due.push(Idle { vm, policy, idle });
            }
        }
        due
    });
    looked.await.unwrap_or_default()
}

impl Node {
    /// Users' VMs that run.
    pub(super) fn running(&self) -> Vec<Arc<VmHandle>> {
        let mut all = self.registry.all();
        all.retain(|vm| !vm.spec.hidden && vm.view.borrow().vm.state == VmState::Running);
        all
    }

    /// Hibernates or stops a VM that was found idle and claimed. If that fails, it is tried again later.
    pub(super) async fn hibernate_or_stop(
        self: Arc<Self>,
        vm: Arc<VmHandle>,
        policy: IdlePolicy,
        nice: i32,
    ) {
        let done = self.hibernate_or_stop_if_idle(&vm, policy, nice).await;
        let mut watches = self.watches.lock();
        // The next check forgets a VM that does not run.
        let Some(watch) = watches.get_mut(&vm.id) else {
            return;
        };
        watch.tried = false;
        match done {
            Ok(true) => {
                info!(vm = %vm.name, action = ?policy.action, "an idle VM was hibernated or stopped")
            }
            Ok(false) => debug!(vm = %vm.name, "a VM is not idle any more"),
            Err(error) if watch.failed(monotonic_ns(), &error.0.message) => {
                warn!(vm = %vm.name, %error, "an idle VM can't be hibernated or stopped");
            }
            Err(error) => {
                debug!(vm = %vm.name, %error, "an idle VM still can't be hibernated or stopped")
            }
        }
    }

    /// Returns false if it is not idle any more.
    async fn hibernate_or_stop_if_idle(
        &self,
        vm: &Arc<VmHandle>,
        policy: IdlePolicy,
        nice: i32,
    ) -> Result<bool> {
        // A VM with an operation in progress is not idle.
        let Some(one) = vm.try_operate().filter(|one| one.state == VmState::Running) else {
            return Ok(false);
        };
        let hibernating = self.begin_hibernation(vm, &one);
        // A new use of the VM waits for the mark from here on.
        if !self.is_idle(vm, policy).await {
            return Ok(false);
        }
        match policy.action {
            IdleAction::Hibernate => {
                let socket = self.capturable(vm).await?;
                let watch = Stopwatch::start(&self.host.clock);
                self.hibernate_now(vm, &socket, hibernating, nice, watch)
                    .await?;
            }
            IdleAction::Stop => {
                vm.ask(|reply| Command::Stop(DEFAULT_GRACE, reply))
                    .await??;
            }
        }
        Ok(true)
    }

    /// Is a VM still idle that was idle when it was queued for hibernation?
    async fn is_idle(&self, vm: &VmHandle, policy: IdlePolicy) -> bool {
        let last_use_ns = vm.activity.last_ns();
        let idle_now = |watch: &Watch| watch.idle(monotonic_ns(), last_use_ns);
        let idle = self.watches.lock().get(&vm.id).map(idle_now);
        let is_used = !vm.activity.in_words().is_empty();
        if is_used || idle.is_none_or(|idle| idle < idle_time(&policy)) {
            return false;
        }
        if !has_published_ports(vm) {
            return true;
        }
        let network = Arc::clone(&self.host.network);
        let open = tokio::task::spawn_blocking(move || network.open_connections()).await;
        matches!(open, Ok(Some(open)) if !open.contains_key(&vm.id))
    }
}

fn with_idle_policy(vm: Arc<VmHandle>) -> Option<(Arc<VmHandle>, IdlePolicy)> {
    let policy = vm.spec.idle?;
    Some((vm, policy))
}

fn idle_time(policy: &IdlePolicy) -> Duration {
    Duration::from_secs(policy.after_s.into())
}

/// Are ports of the host published to it?
fn has_published_ports(vm: &VmHandle) -> bool {
    let network = vm.spec.network.as_ref();
    network.is_some_and(|network| !network.ports.is_empty())
}
