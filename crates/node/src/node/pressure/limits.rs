//! Has the kernel throttle growing VMs while memory is low, so that between two checks they use up
//! neither the remaining memory nor what the first of them needs.

use super::super::Node;
use super::halt::Growing;
use jiffy_sys::mutex::lock;
use jiffy_vmhost::handle::VmHandle;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Only one thread sets limits at a time.
#[derive(Debug, Default)]
pub(super) struct Limits {
    /// How often all limits were lifted: limits from before a lift are not set any more.
    lifts: AtomicU64,
    turn: Mutex<()>,
    /// The daemon ends: no limits are set any more.
    is_over: AtomicBool,
}

impl Node {
    /// Limits the growth of each of these VMs to this many bytes from now on, except the first VM
    /// and VMs with an operation in progress: a capture needs memory. `None` lifts the limits of all
    /// VMs.
    pub(super) fn limit_growth(
        self: &Arc<Self>,
        vms: &[Arc<VmHandle>],
        growing: &Growing,
        bytes: Option<u64>,
    ) {
        // One that was limited may be paused by now; it would still be throttled when it is resumed.
        let all = bytes.is_none().then(|| self.registry.all());
        let vms = all.as_deref().unwrap_or(vms);
        let limits = vms.iter().filter_map(|vm| {
            let pid = vm.view.borrow().vm.pid?;
            let is_free = growing.is_first(vm) || vm.try_operate().is_none();
            Some((pid, bytes.filter(|_| !is_free)))
        });
        let limits: Vec<_> = limits.collect();
        let lifts = match bytes {
            None => self.pressure.limits.lifts.fetch_add(1, Ordering::Relaxed) + 1,
            Some(_) => self.pressure.limits.lifts.load(Ordering::Relaxed),
        };
        let node = Arc::clone(self);
        // Not awaited: the kernel may reclaim memory for seconds meanwhile. A check that comes
        // before it has finished sets no limits.
        tokio::task::spawn_blocking(move || {
            let set = &node.pressure.limits;
            let turn = match bytes {
                None => Some(lock(&set.turn)),
                Some(_) => set.turn.try_lock().ok(),
            };
            let Some(_turn) = turn else { return };
            for (pid, bytes) in limits {
                let is_over = bytes.is_some() && set.is_over.load(Ordering::Relaxed);
                if set.lifts.load(Ordering::Relaxed) == lifts && !is_over {
                    node.host.launcher.limit_growth(pid, bytes);
                }
            }
        });
    }

    /// The daemon ends: lifts the limits of all VMs, and sets none any more.
    pub(super) fn lift_limits_for_good(&self) {
        let set = &self.pressure.limits;
        set.is_over.store(true, Ordering::Relaxed);
        let _turn = lock(&set.turn);
        for vm in self.registry.all() {
            if let Some(pid) = vm.view.borrow().vm.pid {
                self.host.launcher.limit_growth(pid, None);
            }
        }
    }
}
