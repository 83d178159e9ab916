//! A VM as the API shows it.

use super::Node;
use jiffy_vmhost::handle::VmHandle;
use jiffy_wire::api::{Vm, VmState};

/// Why a halted VM does not answer.
const HALTED: &str = "The host has nearly no memory left, and this VM keeps growing: it is halted until other VMs end or free memory.";

impl Node {
    /// Does [`Node::shown`] add anything to the view of this VM?
    pub fn has_more_to_show(&self, vm: &VmHandle) -> bool {
        let state = vm.view.borrow().vm.state;
        match state {
            VmState::Running => vm.spec.idle.is_some() || self.pressure.is_halted(&vm.id),
            VmState::Hibernated => matches!(vm.waking.last(), Some((_, Err(_)))),
            _ => false,
        }
    }

    /// A VM as the API shows it, with its activity, or why it could not be woken.
    pub fn shown(&self, vm: &VmHandle) -> Vm {
        let mut shown = vm.vm();
        if let (VmState::Running, Some(idle)) = (shown.state, &mut shown.idle) {
            self.watches.describe(idle, &vm.id, &vm.activity);
        }
        if self.pressure.is_halted(&vm.id) {
            shown.error.get_or_insert_with(|| HALTED.to_owned());
        }
        if shown.state == VmState::Hibernated
            && let Some((_, Err(error))) = vm.waking.last()
        {
            shown.error.get_or_insert(error.0.message);
        }
        shown
    }
}
