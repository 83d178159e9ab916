//! Root file systems that are not all here.

use super::Node;
use crate::error::Result;
use crate::vm::VmHandle;
use crate::vm::record::Root;
use jiffy_wire::api::VmState;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

/// How long after a guest is ready it is taken to be booting still: its first
/// command begins.
const BOOT_TIME: Duration = Duration::from_secs(3);

impl Node {
    /// Has the root file system of a VM filled as it is read.
    pub(super) async fn open_root(&self, vm: &VmHandle, root: &Root) -> Result<()> {
        let Some(disk) = root.lazy.clone() else {
            return Ok(());
        };
        self.settings.pager.open_disk(&disk).await?;
        let pager = Arc::clone(&self.settings.pager);
        let mut view = vm.view.clone();
        tokio::spawn(async move {
            let before = |state: VmState| matches!(state, VmState::Created | VmState::Starting);
            let _ = view.wait_for(|view| !before(view.vm.state)).await;
            let over = view.wait_for(|view| !view.is_active());
            let _ = tokio::time::timeout(BOOT_TIME, over).await;
            pager.end_recording(&disk).await;
        });
        Ok(())
    }

    /// Fetches all that is missing of a root file system: what is kept of a VM
    /// must not need a registry.
    pub(super) async fn complete_root(&self, root: &Root) -> Result<()> {
        match &root.lazy {
            Some(disk) => self.settings.pager.complete_disk(disk).await,
            None => Ok(()),
        }
    }

    /// Lets go of disks that no VM that runs has.
    pub(super) async fn close_disks(&self) {
        let mut used = HashSet::new();
        for vm in self.registry.all() {
            let view = vm.view.borrow();
            let root = view.root.as_ref().filter(|_| view.lives());
            used.extend(
                root.and_then(|root| root.lazy.as_ref())
                    .map(|lazy| lazy.name()),
            );
        }
        let pager = &self.settings.pager;
        pager.close_disks(|name| used.contains(name)).await;
    }
}
