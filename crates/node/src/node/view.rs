//! A VM as the API shows it.

use super::Node;
use jiffy_vmhost::handle::VmHandle;
use jiffy_wire::api::{Vm, VmState};

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
                    error: error.map(|error| error.0.message),
                }
            }
            _ => More::default(),
        }
    }
}
