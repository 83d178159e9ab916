//! Connections and datagrams to published ports of hibernated VMs: they wake their VM and are
//! forwarded to it.

use super::Node;
use super::operation::Caller;
use jiffy_content::error::{Error, Result};
use jiffy_vmhost::activity::Use;
use jiffy_vmhost::handle::VmHandle;
use jiffy_vmhost::network::InboundConnection;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout};
use tracing::debug;

/// How long a connection waits until its VM is awake, besides its wait for memory and vCPUs.
const WAKE_TIME: Duration = Duration::from_secs(120);
/// How long further connections are refused after a failed wake, so that clients that retry in a
/// loop do not keep the host busy.
const AFTER_A_FAILURE: Duration = Duration::from_secs(1);

/// Forwards all connections, each in its own task.
pub(super) async fn forward_connections(node: Arc<Node>) {
    let Some(mut connections) = node.host.network.inbound() else {
        return;
    };
    while let Some(connection) = connections.recv().await {
        // A connection is reset if its VM does not exist any more.
        if let Some(vm) = node.registry.get(&connection.vm.to_string()) {
            tokio::spawn(forward_connection(Arc::clone(&node), vm, connection));
        }
    }
}

async fn forward_connection(node: Arc<Node>, vm: Arc<VmHandle>, connection: InboundConnection) {
    let _in_use = vm.activity.begin(Use::Connection);
    // The reason of a failed wake is logged once, not for each connection.
    let Ok(()) = node.wake_with_timeout(&vm).await else {
        return;
    };
    // Further datagrams to a VM that sleeps again must wake it; an open connection stays open.
    let is_flow = connection.is_flow();
    tokio::select! {
        relayed = connection.relay() => if let Err(error) = relayed {
            debug!(vm = %vm.name, %error, "a connection to a published port failed");
        },
        _ = vm.when(|view| !view.lives() || is_flow && !view.is_active()) => {}
    }
}

impl Node {
    /// Wakes a VM for a connection to one of its ports; returns when its agent is ready.
    ///
    /// # Errors
    ///
    /// If the VM can't be woken, or its agent does not become ready.
    pub async fn wake_for_connection(self: &Arc<Self>, vm: &Arc<VmHandle>) -> Result<()> {
        self.wake_with_timeout(vm).await?;
        self.agent_ready(vm).await
    }

    /// Where this host reaches a TCP port of a VM; `None` if it can't.
    pub fn server(&self, vm: &VmHandle, port: u16) -> Option<SocketAddr> {
        self.host.network.server(&vm.id, port)
    }

    async fn wake_with_timeout(self: &Arc<Self>, vm: &Arc<VmHandle>) -> Result<()> {
        let wait = Caller::current().wait;
        let limit = self.host.room.wait_limit(wait) + WAKE_TIME;
        let now = Instant::now();
        let since = now.checked_sub(AFTER_A_FAILURE).unwrap_or(now);
        let woken = timeout(limit, self.wake_unless_failed_since(vm, since)).await;
        woken.unwrap_or_else(|_| {
            let name = &vm.name;
            Err(Error::vm_failed(format!(
                "The VM {name} did not wake in time."
            )))
        })
    }
}
