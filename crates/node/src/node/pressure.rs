//! Reclaims memory from idle VMs when the host has little left, or when a request waits for it.
//!
//! Guests' caches come first, then whole VMs, least recently used first. VMs that keep growing are
//! halted (`halt`) before the OOM killer strikes. Between two checks the kernel throttles them
//! (`limits`), if VMMs have control groups.

mod halt;
mod limits;

use super::idle::{Idle, find_idle};
use super::{Node, balloon};
use crate::idle::sample;
use crate::pressure::level::{self, Halts, Level, Reading, Relief};
use crate::pressure::stalls::Stalls;
use halt::{Growing, Growth};
use jiffy_sys::mutex::lock;
use jiffy_vmhost::handle::VmHandle;
use jiffy_wire::api::{IdleAction, IdlePolicy, VmState};
use limits::Limits;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep};
use tracing::{debug, info};

/// How long a VM must have been idle.
const IDLE: IdlePolicy = IdlePolicy {
    after_s: 3,
    action: IdleAction::Hibernate,
};
/// VMs that are hibernated, and guests whose caches are reclaimed, at a time: others need the disk
/// and the processors, too.
const AT_ONCE: usize = 4;
/// Delay of the check after a VM has started: the VM can't fill the host's memory earlier.
const FIRST: Duration = Duration::from_secs(1);
/// Time in which the queue may empty by itself.
const SETTLE: Duration = Duration::from_millis(50);
/// Smallest amount of caches worth reclaiming, MiB.
const WORTH: u32 = 16;
/// What is left to a guest: one in this many parts of its memory, but at least so many MiB.
const LEFT: u64 = 8;
const LEFT_MIB: u64 = 32;
/// Time limit of the balloon.
const SQUEEZE_TIME: Duration = Duration::from_secs(5);
/// Time until a guest's caches are checked again.
const AGAIN: Duration = Duration::from_secs(30);

/// VMs from which memory is being reclaimed.
#[derive(Debug, Default)]
pub(super) struct Pressure {
    /// When caches of VMs were last reclaimed, by id.
    squeezed: Mutex<HashMap<String, Instant>>,
    /// VMs that grow, and those that are halted.
    growth: Growth,
    /// MiB that will be freed by hibernations in progress.
    being_freed: AtomicU64,
    limits: Limits,
}

impl Pressure {
    /// Is the VM with this id halted because it grows?
    pub(super) fn is_halted(&self, id: &str) -> bool {
        self.growth.is_halted(id)
    }

    fn squeezed(&self) -> MutexGuard<'_, HashMap<String, Instant>> {
        lock(&self.squeezed)
    }
}

/// The daemon ends: VMs that were halted or throttled run on, because none watches them until the next
/// one starts.
pub(super) async fn end(node: &Arc<Node>) {
    let lifting = Arc::clone(node);
    let lifted = tokio::task::spawn_blocking(move || lifting.lift_limits_for_good());
    node.resume_all_for_good().await;
    let _ = lifted.await;
}

/// Watches the host's memory as long as VMs run.
pub(super) async fn watch_memory(node: Arc<Node>) {
    let Some(reserve) = node.host.room.kept_free() else {
        return;
    };
    let mut stalls = Stalls::of_host();
    let mut events = node.host.events.subscribe();
    let places = Arc::new(Semaphore::new(AT_ONCE));
    // An earlier daemon may have left limits on its VMs.
    let mut limited = true;
    loop {
        events.skip();
        let vms = node.running();
        if vms.is_empty() {
            node.room().set_low_memory(false);
            events.vm_runs().await;
            sleep(FIRST).await;
            continue;
        }
        let (relief, growing) = node.assess(reserve, &vms);
        if limited || relief.growth.is_some() {
            node.limit_growth(&vms, &growing, relief.growth);
        }
        limited = relief.growth.is_some();
        match relief.level {
            Level::Enough => {
                node.resume_all();
                node.deflate_idle(&vms, |_| true).await;
            }
            Level::Low | Level::Short => node.relieve(&places, vms, &growing, relief).await,
        }
        let waits = async {
            node.host.room.wait_until_queued().await;
            sleep(SETTLE).await;
        };
        // The pause was computed for the VMs that run now.
        let begins = async {
            events.vm_runs().await;
            sleep(FIRST).await;
        };
        tokio::select! {
            () = sleep(relief.pause) => {}
            () = begins => {}
            () = stalls.next() => {}
            () = waits, if relief.level == Level::Enough => {}
        }
    }
}

impl Node {
    fn assess(&self, reserve: u64, vms: &[Arc<VmHandle>]) -> (Relief, Growing) {
        let host = std::thread::available_parallelism().map_or(1, usize::from);
        let vcpus: u64 = vms
            .iter()
            .map(|vm| u64::from(vm.view.borrow().vm.cpus))
            .sum();
        // If MemAvailable can't be read, nothing is assumed to be short.
        let available = self.host.room.host_memory();
        let available = available.map_or(u64::MAX, |memory| memory.available);
        let is_low = level::is_low(reserve, available);
        self.host.room.set_low_memory(is_low);
        let growing = match is_low {
            true => self.growing(vms),
            false => Growing::default(),
        };
        let reading = Reading {
            available,
            lacking: self.host.room.lacking(),
            vms: vms.iter().map(|vm| memory_mib(vm)).sum(),
            others: (vms.len() as u64).saturating_sub(1),
            first: growing.first_headroom(),
            processors: vcpus.min(host as u64),
            halted: self.pressure.growth.any_halted(),
        };
        (level::decide(reserve, &reading), growing)
    }

    /// Reclaims caches of idle guests and hibernates idle VMs, until that will free enough memory.
    async fn relieve(
        self: &Arc<Self>,
        places: &Arc<Semaphore>,
        vms: Vec<Arc<VmHandle>>,
        growing: &Growing,
        relief: Relief,
    ) {
        self.halt_or_resume(&vms, growing, relief.halts);
        let candidates = vms.iter().map(|vm| (Arc::clone(vm), IDLE)).collect();
        let mut idle = find_idle(self, candidates).await;
        idle.sort_by_key(|vm| Reverse(vm.idle));
        self.deflate_idle(&vms, |vm| !vm.activity.in_words().is_empty())
            .await;
        let being_freed = self.pressure.being_freed.load(Ordering::Relaxed);
        if relief.halts == Halts::All
            && being_freed == 0
            && !idle.iter().any(|one| may_hibernate(&one.vm))
        {
            self.log_stuck();
        }
        for Idle { vm, idle, .. } in idle {
            let may_hibernate = may_hibernate(&vm);
            if relief.level == Level::Short && may_hibernate {
                let being_freed = self.pressure.being_freed.load(Ordering::Relaxed);
                if being_freed >= relief.wanted {
                    continue;
                }
                let Ok(place) = Arc::clone(places).try_acquire_owned() else {
                    return;
                };
                if !self.watches.claim(&vm.id) {
                    continue;
                }
                info!(vm = %vm.name, idle_s = idle.as_secs(), wanted_mib = relief.wanted,
                    "memory is short: an idle VM is hibernated early");
                let node = Arc::clone(self);
                let gives = reclaimable_mib(&vm);
                self.pressure
                    .being_freed
                    .fetch_add(gives, Ordering::Relaxed);
                tokio::spawn(async move {
                    let _place = place;
                    // A launch may wait for this memory.
                    let nice = 0;
                    Arc::clone(&node).hibernate_or_stop(vm, IDLE, nice).await;
                    node.pressure
                        .being_freed
                        .fetch_sub(gives, Ordering::Relaxed);
                });
            } else {
                let Ok(place) = Arc::clone(places).try_acquire_owned() else {
                    return;
                };
                if self.mark_squeezed(&vm) {
                    continue;
                }
                let node = Arc::clone(self);
                tokio::spawn(async move {
                    let _place = place;
                    node.take_caches(&vm).await;
                });
            }
        }
    }

    /// Were its caches reclaimed a short time ago? If not, marks them as reclaimed now.
    fn mark_squeezed(&self, vm: &VmHandle) -> bool {
        let now = Instant::now();
        let mut squeezed = self.pressure.squeezed();
        let last = squeezed.insert(vm.id.clone(), now);
        let recent = last.filter(|last| now.duration_since(*last) < AGAIN);
        if let Some(last) = recent {
            squeezed.insert(vm.id.clone(), last);
        }
        recent.is_some()
    }

    async fn take_caches(&self, vm: &VmHandle) {
        let Some(_one) = vm.try_operate().filter(|one| one.state == VmState::Running) else {
            return;
        };
        let Ok(socket) = self.agent_socket(vm).await else {
            return;
        };
        let left = (memory_mib(vm) / LEFT).max(LEFT_MIB);
        let spare = balloon::spare(&socket, left).await;
        if spare.caches >= WORTH {
            info!(vm = %vm.name, caches_mib = spare.caches, "memory is low: the caches of an idle guest are reclaimed");
            self.squeeze(vm, spare, SQUEEZE_TIME).await;
        }
    }

    /// Deflates the balloons of those of these VMs that satisfy `which` and were squeezed, and
    /// forgets VMs that do not run. A guest that needs memory earlier takes it (Virtio 1.3
    /// §5.5.6.1, VIRTIO_BALLOON_F_DEFLATE_ON_OOM).
    async fn deflate_idle(&self, vms: &[Arc<VmHandle>], which: impl Fn(&VmHandle) -> bool) {
        let mut theirs = Vec::new();
        self.pressure.squeezed().retain(|id, _| {
            let vm = vms.iter().find(|vm| vm.id == *id);
            theirs.extend(vm.filter(|vm| which(vm)));
            vm.is_some()
        });
        for vm in theirs {
            // A VM that is being hibernated needs its balloon.
            let Some(_one) = vm.try_operate().filter(|one| one.state == VmState::Running) else {
                continue;
            };
            self.pressure.squeezed().remove(&vm.id);
            debug!(vm = %vm.name, "a guest's balloon is deflated");
            self.deflate(vm).await;
        }
    }

    /// Deflates a VM's balloon if its caches were taken: before a capture, because children would
    /// inherit the balloon, and before it shrinks.
    pub(super) async fn deflate_squeezed(&self, vm: &VmHandle) {
        if self.pressure.squeezed().remove(&vm.id).is_some() {
            self.deflate(vm).await;
        }
    }
}

/// Only VMs whose idle policy allows it are hibernated; stopping a VM would lose its state.
fn may_hibernate(vm: &VmHandle) -> bool {
    let idle = vm.spec.idle;
    idle.is_some_and(|policy| policy.action == IdleAction::Hibernate)
}

/// MiB that a VM's programs may use now.
fn memory_mib(vm: &VmHandle) -> u64 {
    vm.view.borrow().vm.memory_mib.into()
}

/// MiB that hibernating a VM frees.
fn reclaimable_mib(vm: &VmHandle) -> u64 {
    (resident_kib(vm) >> 10).max(1)
}

/// MiB of the host's memory that these VMs use. What several share counts for each.
pub(super) fn used_mib(vms: &[Arc<VmHandle>]) -> u64 {
    vms.iter().map(|vm| resident_kib(vm)).sum::<u64>() >> 10
}

fn resident_kib(vm: &VmHandle) -> u64 {
    let pid = vm.view.borrow().vm.pid;
    pid.and_then(sample::resident_kib).unwrap_or(0)
}
