//! Makes new VMs, completely or not at all.

use super::{Node, run_to_completion};
use jiffy_content::error::Result;
use jiffy_vmhost::folders;
use jiffy_vmhost::handle::{Command, VmHandle};
use std::future::Future;
use std::sync::Arc;
use tokio::runtime::Handle;
use tracing::warn;

/// Removes a new VM if it is dropped before the VM is finished, because the client left.
struct Unfinished(Option<Arc<VmHandle>>);

impl Drop for Unfinished {
    fn drop(&mut self) {
        if let Some(vm) = self.0.take()
            && let Ok(runtime) = Handle::try_current()
        {
            runtime.spawn(async move {
                let _ = vm.ask(|reply| Command::Remove(true, reply)).await;
            });
        }
    }
}

impl Node {
    /// Completes a VM that was just registered. The VM is discarded if that fails, and removed at
    /// once if the client leaves.
    ///
    /// Work in progress then continues to its end, because copies can't be interrupted and the
    /// pager must not be left in the middle of a request. It fails when it hands over the plan at
    /// the latest, and releases what it holds.
    pub(super) async fn finish_for_client(
        self: &Arc<Self>,
        vm: &Arc<VmHandle>,
        rest: impl Future<Output = Result<()>> + Send + 'static,
    ) -> Result<()> {
        let mut unfinished = Unfinished(Some(Arc::clone(vm)));
        let (node, made) = (Arc::clone(self), Arc::clone(vm));
        let done = run_to_completion(async move {
            let done = rest.await;
            if done.is_err() {
                node.discard(&made).await;
            }
            done
        });
        done.await?;
        unfinished.0 = None;
        Ok(())
    }

    /// Removes a VM that could not be made or started, with everything made for it.
    pub(super) async fn discard(&self, vm: &VmHandle) {
        let asked = vm.ask(|reply| Command::Remove(true, reply)).await;
        if asked.is_ok() {
            return;
        }
        // Another request removed the VM while it was being made; its folder may have been made
        // after that.
        let (paths, id) = (self.host.paths.clone(), vm.id.clone());
        let removed = tokio::task::spawn_blocking(move || folders::remove(&paths, &id)).await;
        if let Ok(Err(error)) = removed {
            warn!(vm = %vm.name, %error, "what was made of a VM could not be removed");
        }
    }
}
