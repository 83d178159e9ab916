//! Recordings of what runs on each CPU.

use super::Node;
use jiffy_content::error::{Error, Result};
use jiffy_vmhost::handle::VmHandle;
use jiffy_vmhost::sched_trace::Recording;
use jiffy_vmhost::scheduler::ProcessChange;
use jiffy_wire::api::{SchedTrace, VmState};
use jiffy_wire::sched::Class;
use std::time::Duration;
use tokio::task::block_in_place;
use tokio::time::timeout;

impl Node {
    /// Records which thread runs on which CPU for this time, or until [`Node::end_trace`]. If it is
    /// dropped, nothing is left.
    ///
    /// # Errors
    ///
    /// If a recording is in progress, this is not root, or the kernel's tracing can't be used.
    pub async fn trace_scheduling(&self, time: Duration) -> Result<SchedTrace> {
        let Some(journal) = self.host.scheduler.journal() else {
            return Err(
                Error::conflict("What runs on each CPU is already being recorded.")
                    .hint("Wait until that recording ends."),
            );
        };
        let recording = block_in_place(Recording::begin)?;
        let vms = self.registry.all();
        let mut told: Vec<ProcessChange> = vms.iter().filter_map(|vm| now(vm)).collect();
        let _ = timeout(time, self.traced.notified()).await;
        told.extend(journal.take());
        let clock = self.host.clock.clone();
        block_in_place(|| recording.end(clock, told))
    }

    /// Ends the recording in progress, if there is one.
    pub fn end_trace(&self) {
        self.traced.notify_waiters();
    }
}

/// The monitor of a VM, if it has one, and its class.
fn now(vm: &VmHandle) -> Option<ProcessChange> {
    let view = &vm.view.borrow().vm;
    let starts = view.state == VmState::Starting && !vm.spec.hidden;
    Some(ProcessChange {
        at_ns: 0,
        pid: view.pid?,
        vm: Some(view.name.clone()),
        class: starts.then_some(Class::Launch),
    })
}
