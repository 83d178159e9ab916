//! Root file systems that are not all here.

use super::Node;
use crate::error::Result;
use crate::snapshots::draft::Draft;
use crate::snapshots::manifest::Manifest;
use crate::snapshots::saved::Saved;
use crate::vm::VmHandle;
use crate::vm::record::Root;
use jiffy_wire::api::{Snapshot, VmState};
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

    /// A snapshot of this name, with all that is known of it.
    pub(crate) fn saved_snapshot(&self, name: &str) -> Result<Saved> {
        self.snapshots.find(name)
    }

    /// The snapshot that was pulled by this reference, and its manifest's
    /// digest.
    pub(crate) fn pulled_snapshot(&self, name: &str) -> Option<(Snapshot, String)> {
        let saved = self.snapshots.find(name).ok()?;
        let manifest = saved.manifest.source.as_ref()?.manifest.clone()?;
        Some((saved.shown(name, false, Vec::new()), manifest))
    }

    /// Gives a snapshot that was pulled its name; the one before must not be
    /// needed.
    pub(crate) async fn keep_snapshot(
        &self,
        name: &str,
        draft: Draft,
        manifest: &Manifest,
    ) -> Result<Snapshot> {
        if self.snapshots.find(name).is_ok() {
            self.remove_snapshot(name).await?;
        }
        let (to, manifest) = (self.snapshots.path(name), manifest.clone());
        let named = tokio::task::spawn_blocking(move || draft.name(&to, &manifest, false));
        let saved = super::operation::joined(named.await)?;
        Ok(saved.shown(name, false, Vec::new()))
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
