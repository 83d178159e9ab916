//! Published ports of VMs in the machine: ports of this host are forwarded to the machine.

use super::Context;
use super::context::each;
use crate::client::Client;
use crate::failure::{Failure, Outcome, Result};
use crate::place::machine;
use jiffy_machine::{Forward, PortsLock};
use jiffy_wire::api::{Vm, VmState};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// How long another command may take to list VMs' ports and forward them.
const LOCK_TIME: Duration = Duration::from_secs(60);
/// Pause between two attempts to lock the list.
const LOCK_PAUSE: Duration = Duration::from_millis(10);

impl Context {
    /// Forwards the ports of all VMs, and `more`, to the machine. Does nothing where VMs run on
    /// this host itself.
    ///
    /// # Errors
    ///
    /// If the node can't be asked, another command changes the ports for too long, or a port is not
    /// available on this host.
    pub async fn forward_ports(&self, client: &Client, more: &[String]) -> Result<()> {
        self.forward(client, None, more).await
    }

    /// Forwards the ports of all VMs after a verb has succeeded: a failure is only reported. The
    /// ports of the VM `over`, which has ended but may still be listed, are not forwarded.
    pub async fn forward_ports_after(&self, client: &Client, over: Option<&str>) {
        if let Err(failure) = self.forward(client, over, &[]).await {
            failure.report();
        }
    }

    /// [`each`] for verbs that start or end VMs: updates the forwarded ports afterwards.
    ///
    /// # Errors
    ///
    /// If `each` does. If ports can't be forwarded, that is only reported.
    pub async fn each_with_ports(
        &self,
        client: &Client,
        vms: &[String],
        act: impl AsyncFnMut(&str) -> Result<()>,
    ) -> Result<Outcome> {
        let outcome = each(vms, act).await;
        self.forward_ports_after(client, None).await;
        outcome
    }

    /// Forwards the ports of hibernated VMs to a machine that was started by this command: its QEMU
    /// forwards none yet.
    pub async fn forward_ports_of_new_machine(&self) {
        if let Some(client) = self.take_new_machine() {
            self.forward_ports_after(&client, None).await;
        }
    }

    async fn forward(&self, client: &Client, over: Option<&str>, more: &[String]) -> Result<()> {
        if !self.in_machine() {
            return Ok(());
        }
        // This forwards all ports, those of hibernated VMs as well.
        drop(self.take_new_machine());
        let lock = self.lock_ports().await?;
        let vms: Vec<Vm> = client.get("/v1/vms?all=true").await?;
        machine::forward(&self.folders, &lock, &wanted(&vms, over, more))
    }

    /// Waits for other commands that forward ports. It does not block the thread, because the other
    /// one may be this command itself.
    async fn lock_ports(&self) -> Result<PortsLock> {
        let until = Instant::now() + LOCK_TIME;
        loop {
            if let Some(lock) = machine::try_lock_ports(&self.folders)? {
                return Ok(lock);
            }
            if Instant::now() > until {
                return Err(Failure::new(format!(
                    "another jiffy has been changing the machine's ports for {} s",
                    LOCK_TIME.as_secs()
                ))
                .hint("end that command, and repeat this one"));
            }
            tokio::time::sleep(LOCK_PAUSE).await;
        }
    }
}

/// The ports of running and hibernated VMs, except `over`, and `more`.
fn wanted(vms: &[Vm], over: Option<&str>, more: &[String]) -> BTreeSet<Forward> {
    let lives = |vm: &&Vm| {
        let ended = matches!(vm.state, VmState::Created | VmState::Exited);
        !ended && over != Some(vm.id.as_str())
    };
    let ports = vms
        .iter()
        .filter(lives)
        .filter_map(|vm| vm.network.as_ref());
    let ports = ports.flat_map(|network| &network.ports).chain(more);
    ports.flat_map(|port| Forward::of_published(port)).collect()
}
