//! Halts growing VMs when the host is nearly out of memory: their vCPUs are stopped until there is
//! some. Otherwise the OOM killer would kill one of them, or another program.

use super::super::Node;
use crate::idle::sample::resident_kib;
use crate::pressure::level::Halts;
use jiffy_sys::mutex::lock;
use jiffy_vmhost::agent::{self, AgentError};
use jiffy_vmhost::handle::VmHandle;
use jiffy_wire::agent::Request;
use jiffy_wire::api::{Priority, VmState};
use jiffy_wire::vmm::ControlRequest;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::net::UnixStream;
use tokio::sync::Notify;
use tokio::sync::oneshot::{self, error::TryRecvError};
use tracing::{debug, error, info, warn};

/// Smallest growth between two checks that counts, KiB.
const GROWS: u64 = 128;
/// How long a VM counts as growing after growth was seen: on a busy host each VM runs rarely.
const GROWN: Duration = Duration::from_secs(3);

/// Memory of a VMM besides its guest's, MiB.
const OVERHEAD: u64 = 8;

/// Growth of VMs while memory is low.
#[derive(Debug, Default)]
pub(super) struct Growth {
    state: Mutex<State>,
    /// Notifies when a VM is halted or not halted any more.
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// Memory of each VM at the last check, by id.
    last: HashMap<String, Usage>,
    /// Halted VMs, by id. Dropping the sender resumes the VM.
    halted: HashMap<String, oneshot::Sender<()>>,
    /// Whether it was logged that no idle VM can free memory.
    logged: bool,
    /// The daemon ends: no VM is halted any more.
    is_over: bool,
}

#[derive(Debug, Clone, Copy)]
struct Usage {
    /// KiB of the host's memory.
    kib: u64,
    /// When growth was last seen.
    grew: Option<Instant>,
}

impl Usage {
    /// The usage at this time, compared with the last one.
    fn now(last: Option<&Usage>, now: Instant, kib: u64) -> Usage {
        let grew = match last {
            Some(last) if kib >= last.kib.saturating_add(GROWS) => Some(now),
            Some(last) => last.grew,
            None => None,
        };
        Usage { kib, grew }
    }

    fn is_growing(&self, now: Instant) -> bool {
        self.grew.is_some_and(|at| now.duration_since(at) < GROWN)
    }
}

impl Growth {
    /// Is any VM halted?
    pub(super) fn any_halted(&self) -> bool {
        !self.state().halted.is_empty()
    }

    /// Is the VM with this id halted?
    pub(super) fn is_halted(&self, id: &str) -> bool {
        self.state().halted.contains_key(id)
    }

    /// Waits until the VM with this id is halted (true), or is not.
    pub(super) async fn when_halted(&self, id: &str, halted: bool) {
        loop {
            let changed = self.changed.notified();
            if self.is_halted(id) == halted {
                return;
            }
            changed.await;
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Resumes all VMs; returns their ids. If the daemon ends, halts no other.
    fn resume_all(&self, is_over: bool) -> Vec<String> {
        let mut state = self.state();
        let over = state.is_over || is_over;
        let next = State {
            is_over: over,
            ..State::default()
        };
        let before = std::mem::replace(&mut *state, next);
        drop(state);
        self.changed.notify_waiters();
        before.halted.into_keys().collect()
    }
}

/// VMs with a higher priority are halted last; among equals, those that were made first.
fn rank(vm: &VmHandle) -> (Reverse<Priority>, u64) {
    (Reverse(vm.spec.priority), vm.view.borrow().vm.created)
}

/// Growing VMs.
#[derive(Default)]
pub(super) struct Growing {
    /// Those that are not halted.
    vms: Vec<Arc<VmHandle>>,
    /// The highest-ranked one, halted or not: the others wait for it.
    first: Option<Arc<VmHandle>>,
    /// Its memory, KiB.
    has: u64,
}

impl Growing {
    /// By how much the first VM can still grow, up to its configured memory, MiB.
    pub(super) fn first_headroom(&self) -> u64 {
        let may_have = |vm: &Arc<VmHandle>| super::memory_mib(vm) + OVERHEAD;
        self.first
            .as_ref()
            .map_or(0, |vm| may_have(vm).saturating_sub(self.has >> 10))
    }

    pub(super) fn is_first(&self, vm: &VmHandle) -> bool {
        self.first.as_ref().is_some_and(|first| first.id == vm.id)
    }
}

impl Node {
    /// Which of these VMs have grown since the last check.
    pub(super) fn growing(&self, vms: &[Arc<VmHandle>]) -> Growing {
        let mut state = self.pressure.growth.state();
        let State { last, halted, .. } = &mut *state;
        let now = Instant::now();
        let have = vms.iter().map(|vm| {
            let pid = vm.view.borrow().vm.pid;
            let kib = pid.and_then(resident_kib).unwrap_or(0);
            (vm.id.clone(), Usage::now(last.get(&vm.id), now, kib))
        });
        *last = have.collect();
        let (waits, grows): (Vec<_>, Vec<_>) = vms
            .iter()
            .filter(|vm| halted.contains_key(&vm.id) || last[&vm.id].is_growing(now))
            .partition(|vm| halted.contains_key(&vm.id));
        let first = waits.iter().chain(&grows).min_by_key(|vm| rank(vm));
        Growing {
            first: first.map(|vm| Arc::clone(vm)),
            has: first.map_or(0, |vm| last[&vm.id].kib),
            vms: grows.into_iter().cloned().collect(),
        }
    }

    /// Halts growing VMs, or resumes one.
    pub(super) fn halt_or_resume(
        self: &Arc<Self>,
        vms: &[Arc<VmHandle>],
        growing: &Growing,
        halts: Halts,
    ) {
        let mut state = self.pressure.growth.state();
        if state.is_over {
            return;
        }
        let halted = &mut state.halted;
        let resumed = match halts {
            Halts::All => None,
            Halts::AllButFirst => growing.first.as_ref(),
            Halts::ResumeInTurn if !growing.vms.is_empty() => return,
            Halts::ResumeInTurn | Halts::Resume => {
                let halted = vms.iter().filter(|vm| halted.contains_key(&vm.id));
                halted.min_by_key(|vm| rank(vm))
            }
        };
        if let Some(vm) = resumed {
            halted.remove(&vm.id);
            self.pressure.growth.changed.notify_waiters();
        }
        if matches!(halts, Halts::Resume | Halts::ResumeInTurn) {
            return;
        }
        for vm in &growing.vms {
            if resumed.is_none_or(|one| one.id != vm.id) {
                let (release, released) = oneshot::channel();
                halted.insert(vm.id.clone(), release);
                self.pressure.growth.changed.notify_waiters();
                tokio::spawn(Arc::clone(self).halt(Arc::clone(vm), released));
            }
        }
    }

    /// Logs once that VMs are halted and no idle VM can free memory.
    pub(super) fn log_stuck(&self) {
        let mut state = self.pressure.growth.state();
        if !state.halted.is_empty() && !std::mem::replace(&mut state.logged, true) {
            error!(
                halted = state.halted.len(),
                "the host has too little memory for its VMs, and no idle VM can be hibernated: growing VMs are halted until other VMs end or free memory"
            );
        }
    }

    /// There is enough memory: resumes all VMs.
    pub(super) fn resume_all(&self) {
        self.pressure.growth.resume_all(false);
    }

    /// The daemon ends: resumes all VMs, and halts none any more. No daemon would watch them.
    pub(super) async fn resume_all_for_good(&self) {
        for id in self.pressure.growth.resume_all(true) {
            // It is resumed when its halt is over.
            if let Some(vm) = self.registry.get(&id) {
                drop(vm.operate().await);
            }
        }
    }

    /// Sends a request to a VM's agent. A VM that is halted, or is halted meanwhile, gets it when it
    /// has been resumed.
    ///
    /// # Errors
    ///
    /// As in [`agent::ask`].
    pub async fn ask_agent(
        &self,
        vm: &VmHandle,
        socket: &Path,
        request: &Request,
    ) -> Result<UnixStream, AgentError> {
        let growth = &self.pressure.growth;
        loop {
            growth.when_halted(&vm.id, false).await;
            tokio::select! {
                asked = agent::ask(socket, request) => return asked,
                () = growth.when_halted(&vm.id, true) => {}
            }
        }
    }

    /// Halts a VM until it is released or is being ended.
    async fn halt(self: Arc<Self>, vm: Arc<VmHandle>, mut released: oneshot::Receiver<()>) {
        let one = vm.try_operate().filter(|one| one.state == VmState::Running);
        // One that was released before this began need not stop, and the daemon may be ending.
        let is_wanted = released.try_recv() != Err(TryRecvError::Closed);
        if one.is_some() && is_wanted {
            info!(vm = %vm.name, "memory is nearly used up: a growing VM is halted");
            let paused = self.order(&vm, "halted", ControlRequest::Pause).await;
            if let Err(error) = paused {
                debug!(vm = %vm.name, %error, "a growing VM can't be halted");
            } else {
                let mut view = vm.view.clone();
                tokio::select! {
                    _ = released => {}
                    _ = view.wait_for(|view| view.vm.state != VmState::Running || view.leaving) => {}
                }
            }
            // Resumed after an error, too, because the VM may have been paused.
            match self.resume_vcpus(&vm).await {
                Ok(()) => info!(vm = %vm.name, "a halted VM was resumed"),
                Err(error) if vm.view.borrow().is_active() => {
                    warn!(vm = %vm.name, %error, "a halted VM can't be resumed");
                }
                Err(_) => {}
            }
        }
        self.pressure.growth.state().halted.remove(&vm.id);
        self.pressure.growth.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_counts_as_growing_for_three_seconds() {
        let begin = Instant::now();
        let at = |ms| begin + Duration::from_millis(ms);
        let mut had = Usage::now(None, at(0), 50_000);
        assert!(!had.is_growing(at(0)), "the first reading counts as growth");
        for (ms, kib, grows) in [
            (200, 50_127, false),
            (400, 50_255, true),
            (600, 50_255, true),
            (3_399, 50_255, true),
            (3_400, 50_255, false),
            (3_600, 40_000, false),
            (3_800, 41_000, true),
        ] {
            had = Usage::now(Some(&had), at(ms), kib);
            assert_eq!(had.is_growing(at(ms)), grows, "{ms}");
        }
    }
}
