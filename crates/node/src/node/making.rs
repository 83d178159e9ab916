//! New VMs: whole, or not there.

use super::{Node, to_the_end};
use jiffy_content::error::Result;
use jiffy_vmhost::folders;
use jiffy_vmhost::handle::{Command, VmHandle};
use std::future::Future;
use std::sync::Arc;
use tokio::runtime::Handle;
use tracing::warn;

/// A new VM that goes when this is dropped before it is finished: whoever
/// wanted it went away.
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
    /// Does what a VM that was just made known needs besides. It is discarded if
    /// that fails, and removed at once if whoever asked goes away.
    ///
    /// What is under way then goes on to its end all the same: copies can't be
    /// cut short, and the pager must not be left in the middle of an order. It
    /// fails at the latest when it has the VM begin, and lets go of what it took.
    pub(super) async fn made_for_somebody(
        self: &Arc<Self>,
        vm: &Arc<VmHandle>,
        rest: impl Future<Output = Result<()>> + Send + 'static,
    ) -> Result<()> {
        let mut unfinished = Unfinished(Some(Arc::clone(vm)));
        let (node, made) = (Arc::clone(self), Arc::clone(vm));
        let done = to_the_end(async move {
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

    /// Removes a VM that could not be made or started, whatever was made of it.
    pub(super) async fn discard(&self, vm: &VmHandle) {
        let asked = vm.ask(|reply| Command::Remove(true, reply)).await;
        if asked.is_ok() {
            return;
        }
        // Removed by somebody else while it was made: its folder may be younger.
        let (paths, id) = (self.host.paths.clone(), vm.id.clone());
        let removed = tokio::task::spawn_blocking(move || folders::remove(&paths, &id)).await;
        if let Ok(Err(error)) = removed {
            warn!(vm = %vm.name, %error, "what was made of a VM could not be removed");
        }
    }
}
