//! A VM as the API shows it.

use super::Node;
use super::operation::join_result;
use jiffy_content::error::Result;
use jiffy_vmhost::folders::check_hibernated_memory;
use jiffy_vmhost::handle::VmHandle;
use jiffy_wire::api::{Vm, VmState};
use std::sync::Arc;
use tracing::warn;

/// Why a halted VM does not answer.
const HALTED: &str = "The host has nearly no memory left, and this VM keeps growing: it is halted until other VMs end or free memory.";

/// What is shown of a VM besides its view.
#[derive(Default, PartialEq)]
struct More {
    /// Its activity.
    activity: bool,
    /// Why it does not answer, or could not be woken.
    error: Option<String>,
}

impl Node {
    /// Checks the memory of those of these VMs that are hibernated since before this daemon began, if that
    /// was not done yet. Afterwards [`Node::shown`] says which can't be woken.
    ///
    /// # Errors
    ///
    /// If the task that checks was cut short.
    pub async fn check_sleepers(self: &Arc<Self>, vms: &[Arc<VmHandle>]) -> Result<()> {
        let unchecked = unchecked_of(vms);
        if unchecked.is_empty() {
            return Ok(());
        }
        let node = Arc::clone(self);
        let work = move || {
            unchecked.iter().for_each(|vm| node.check_sleeper(vm));
            Ok(())
        };
        join_result(tokio::task::spawn_blocking(work).await)
    }

    /// As [`Node::check_sleepers`], of all VMs: blocking.
    pub(super) fn check_all_sleepers(&self) {
        for vm in unchecked_of(&self.registry.all()) {
            self.check_sleeper(&vm);
        }
    }

    fn check_sleeper(&self, vm: &VmHandle) {
        let look = || match check_hibernated_memory(&self.folder(vm), &vm.name) {
            // It was woken, ended or removed meanwhile, which removes the memory.
            Err(_) if vm.view.borrow().vm.state != VmState::Hibernated => Ok(()),
            found => found,
        };
        if let Some(error) = vm.memory_check.run(look) {
            warn!(vm = %vm.name, error, "a VM can't be woken");
        }
    }

    /// Does [`Node::shown`] add anything to the view of this VM?
    pub fn has_more_to_show(&self, vm: &VmHandle) -> bool {
        let state = vm.view.borrow().vm.state;
        self.more_about(vm, state) != More::default()
    }

    /// A VM as the API shows it, with its activity, or why it could not be woken.
    pub fn shown(&self, vm: &VmHandle) -> Vm {
        let mut shown = vm.vm();
        let more = self.more_about(vm, shown.state);
        if let (true, Some(idle)) = (more.activity, &mut shown.idle) {
            self.watches.describe(idle, &vm.id, &vm.activity);
        }
        shown.error = shown.error.or(more.error);
        shown
    }

    fn more_about(&self, vm: &VmHandle, state: VmState) -> More {
        match state {
            VmState::Running => More {
                activity: vm.spec.idle.is_some(),
                error: self.pressure.is_halted(&vm.id).then(|| HALTED.to_owned()),
            },
            VmState::Hibernated => {
                let woken = vm.waking.last().map(|(_, woken)| woken);
                let error = woken.and_then(|woken| woken.err());
                More {
                    activity: false,
                    error: vm
                        .memory_check
                        .problem()
                        .or(error.map(|error| error.0.message)),
                }
            }
            _ => More::default(),
        }
    }
}

/// Those of these VMs that are hibernated since before this daemon began, and whose memory was not checked
/// yet.
fn unchecked_of(vms: &[Arc<VmHandle>]) -> Vec<Arc<VmHandle>> {
    let is_unchecked = |vm: &&Arc<VmHandle>| {
        !vm.memory_check.is_done() && vm.view.borrow().vm.state == VmState::Hibernated
    };
    vms.iter().filter(is_unchecked).cloned().collect()
}
