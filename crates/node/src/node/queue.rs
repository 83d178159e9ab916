//! Memory and vCPUs for starts of VMs, and the queue of requests for them.

use super::Node;
use super::operation::{Caller, client_gone, remaining_wait, wait_deadline};
use jiffy_content::error::{Error, Result};
use jiffy_content::room::memory::{Amount, Reserved};
use jiffy_vmhost::handle::{Operation, View, VmHandle};
use jiffy_wire::api::{Purpose, Queued};
use std::future::Future;
use tokio::time::sleep_until;

/// Waits for memory and vCPUs until the client leaves or the VM's state changes.
async fn until_client_leaves(
    vm: &VmHandle,
    reserving: impl Future<Output = Result<Reserved>>,
) -> Result<Reserved> {
    let state = vm.view.borrow().vm.state;
    let is_another = |view: &View| view.leaving || view.vm.state != state;
    tokio::select! {
        biased;
        // Checked before the reservation, so that nothing is started for a client that has left.
        () = client_gone() => Err(client_left(vm)),
        reserved = reserving => reserved,
        _ = vm.when(is_another) => Err(Error::wrong_state(format!(
            "The VM {} ended or was removed while it waited for memory or vCPUs.",
            vm.name
        ))),
    }
}

/// The caller of this operation, with the rest of its wait.
fn waiting_caller() -> Caller {
    let caller = Caller::current();
    Caller {
        wait: remaining_wait().or(caller.wait),
        ..caller
    }
}

/// Another request for this VM waits for longer than this one may.
pub(super) fn another_waits(vm: &VmHandle) -> Error {
    let name = &vm.name;
    Error::no_room(format!(
        "Another request for the VM {name} waits for memory or vCPUs."
    ))
    .hint("See `jiffy queue`; stop other VMs, end that request, or wait longer with --wait.")
}

fn client_left(vm: &VmHandle) -> Error {
    let name = &vm.name;
    Error::wrong_state(format!(
        "The client that waited for the VM {name} has disconnected."
    ))
}

impl Node {
    /// Waits for a client until no other operation on a VM is in progress. The wait ends if the
    /// client leaves, or if its time is over while the other operation itself waits for memory or
    /// vCPUs.
    pub(super) async fn operate_for_client<'a>(&self, vm: &'a VmHandle) -> Result<Operation<'a>> {
        if let Some(one) = vm.try_operate() {
            return Ok(one);
        }
        let wait = self.host.room.wait_limit(Caller::current().wait);
        let too_long = async {
            sleep_until(wait_deadline(wait)).await;
            self.host.room.when_queued_for(&vm.id).await;
        };
        tokio::select! {
            biased;
            () = client_gone() => Err(client_left(vm)),
            one = vm.operate() => Ok(one),
            () = too_long => Err(another_waits(vm)),
        }
    }

    /// Reserves memory and vCPUs for a start or the growth of this VM, or for `count` children of
    /// it. Waits for them; if the client leaves, the wait ends and the VM is unchanged.
    pub(super) async fn reserve(
        &self,
        vm: &VmHandle,
        purpose: Purpose,
        each: Amount,
        count: u32,
    ) -> Result<Reserved> {
        let request = waiting_caller().request_for(vm, purpose);
        until_client_leaves(vm, self.host.room.reserve(request, each, count)).await
    }

    /// Reserves memory for a capture of this VM, beside the queue.
    pub(super) async fn reserve_for_capture(
        &self,
        vm: &VmHandle,
        amount: Amount,
    ) -> Result<Reserved> {
        let wait = waiting_caller().wait;
        until_client_leaves(vm, self.host.room.reserve_for_capture(amount, wait)).await
    }

    /// The requests that wait for memory or vCPUs, in the order in which they will be served.
    pub fn queue(&self) -> Vec<Queued> {
        self.host.room.queue()
    }

    /// Waits until the queue place of the request with this id differs from `last`; `None` if the
    /// request does not wait.
    pub async fn next_place(&self, request: &str, last: Option<u32>) -> Option<Queued> {
        self.host.room.next_place(request, last).await
    }
}
