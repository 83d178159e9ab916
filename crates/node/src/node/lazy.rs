//! Root file systems that are not all here.

use super::Node;
use jiffy_content::error::{Error, Result};
use jiffy_content::images::lazy::caches;
use jiffy_content::images::policy;
use jiffy_content::model::image::LazyDisk;
use jiffy_content::model::snapshot::Manifest;
use jiffy_content::model::vm::Root;
use jiffy_content::snapshots::draft::Draft;
use jiffy_content::snapshots::saved::Saved;
use jiffy_store::bounded::{keep_within, usage};
use jiffy_sys::locked::Locked;
use jiffy_vmhost::handle::VmHandle;
use jiffy_wire::api::{ErrorKind, ImageSource, Snapshot, VmState};
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::RwLockReadGuard;
use tracing::{info, warn};

/// How long after a guest is ready it is taken to be booting still: its first
/// command begins.
const BOOT_TIME: Duration = Duration::from_secs(3);

/// Has what was fetched stay within its bound, at the start, after each pull
/// and after each VM that read something of it.
pub(super) async fn keep_caches_small(node: Arc<Node>) {
    loop {
        node.trim.notified().await;
        node.trim_caches().await;
    }
}

impl Node {
    /// Has the root file system of a VM filled as it is read.
    pub(super) async fn open_root(&self, vm: &VmHandle, root: &Root) -> Result<()> {
        let Some(disk) = root.lazy.clone() else {
            return Ok(());
        };
        self.provide_disk(root).await?;
        let pager = Arc::clone(&self.host.pager);
        let mut view = vm.view.clone();
        let trim = Arc::clone(&self.trim);
        tokio::spawn(async move {
            let before = |state: VmState| matches!(state, VmState::Created | VmState::Starting);
            let _ = view.wait_for(|view| !before(view.vm.state)).await;
            let over = view.wait_for(|view| !view.is_active());
            let _ = tokio::time::timeout(BOOT_TIME, over).await;
            pager.end_recording(&disk).await;
            let _ = view.wait_for(|view| !view.is_active()).await;
            trim.notify_one();
        });
        Ok(())
    }

    /// Has a root file system there to be opened, and filled from then on.
    pub(crate) async fn provide_disk(&self, root: &Root) -> Result<()> {
        match &root.lazy {
            Some(disk) => self.host.pager.open_disk(disk).await,
            None => Ok(()),
        }
    }

    /// While this is held no disk is closed or made smaller.
    pub(crate) async fn begins(&self) -> RwLockReadGuard<'_, ()> {
        self.beginning.read().await
    }

    /// Something was fetched: it may be more than its bound by now.
    pub(crate) fn caches_grew(&self) {
        self.trim.notify_one();
    }

    /// Has what was fetched stay within its bound.
    ///
    /// Only what no VM uses is given up. A disk that is open in the pager is
    /// closed for that first; one that a VM has, or is about to have, is not.
    async fn trim_caches(&self) {
        let paths = &self.host.paths;
        let limit = match self.cache.of_disk(&paths.data) {
            Ok(limit) => limit,
            Err(error) => {
                warn!(%error, "the size of the data folder's file system is not known");
                return;
            }
        };
        let all = paths.clone();
        let over = tokio::task::spawn_blocking(move || usage(&caches(&all)) > limit).await;
        if !over.unwrap_or(false) {
            return;
        }
        // Whoever begins now tries again at its end.
        let Ok(_alone) = self.beginning.try_write() else {
            return;
        };
        self.goldens.end_lazy_standbys().await;
        self.close_disks().await;
        let all = paths.clone();
        let trimmed = self
            .host
            .pager
            .while_closed(move || keep_within(limit, &caches(&all)));
        match trimmed.await {
            Some(Ok(kept)) if kept.before > kept.after => info!(
                limit,
                before = kept.before,
                after = kept.after,
                "what was fetched and is not in use was given up in part"
            ),
            Some(Err(error)) => warn!(%error, "a cache can't be made smaller"),
            _ => {}
        }
    }

    /// What is missing of an image is had in another way from now on.
    pub(crate) async fn renew_origins(&self, disk: &LazyDisk) {
        self.host.pager.renew_origins(disk).await;
    }

    /// The same of a snapshot's memory and root file system.
    pub(crate) async fn renew_snapshot_origins(&self, name: &str) {
        let Ok(saved) = self.snapshots.find(name) else {
            return;
        };
        self.host.pager.renew_memory(&saved.memory()).await;
        if let Some(disk) = &saved.manifest.lazy_root {
            self.renew_origins(disk).await;
        }
    }

    /// Fetches all that is missing of a root file system: what is kept of a VM
    /// must not need a registry. It stays whole while what this gives is held;
    /// the VM may end meanwhile.
    pub(super) async fn complete_root(&self, root: &Root) -> Result<Option<Locked>> {
        match &root.lazy {
            Some(disk) => self.host.pager.complete_disk(disk).await.map(Some),
            None => Ok(None),
        }
    }

    /// A snapshot of this name, with all that is known of it.
    pub(crate) fn saved_snapshot(&self, name: &str) -> Result<Saved> {
        self.snapshots.find(name)
    }

    /// The snapshot that was pulled by this reference, and where it came from.
    pub(crate) fn pulled_snapshot(&self, name: &str) -> Option<(Snapshot, ImageSource)> {
        let saved = self.snapshots.find(name).ok()?;
        let source = saved.manifest.source.clone();
        let source = source.filter(|source| source.manifest.is_some())?;
        Some((saved.shown(name, false, Vec::new()), source))
    }

    /// Notes who has signed what was pulled by this reference, if it is still there and the
    /// one of this manifest: blocking.
    pub(crate) fn note_signed(
        &self,
        name: &str,
        manifest: &str,
        signed_by: &[String],
    ) -> Result<()> {
        if signed_by.is_empty() || self.images.note_signed(name, manifest, signed_by)? {
            return Ok(());
        }
        let _one = self.snapshots.rewrite(name)?;
        let mut saved = match self.snapshots.find(name) {
            Err(error) if error.0.kind == ErrorKind::NotFound => return Ok(()),
            found => found?,
        };
        let source = saved.manifest.source.as_mut();
        let Some(source) = source.filter(|it| it.manifest.as_deref() == Some(manifest)) else {
            return Ok(());
        };
        policy::add(&mut source.signed_by, signed_by);
        saved
            .manifest
            .save(&saved.folder)
            .map_err(|error| Error::io("write a snapshot's record", &saved.folder, &error))
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
        let pager = &self.host.pager;
        pager.close_disks(|name| used.contains(name)).await;
    }
}
