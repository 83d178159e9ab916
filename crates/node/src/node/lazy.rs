//! Lazy root file systems, whose images are only partly here.

use super::Node;
use jiffy_content::error::{Error, Result};
use jiffy_content::images::lazy::caches;
use jiffy_content::images::policy;
use jiffy_content::model::image::LazyDisk;
use jiffy_content::model::snapshot::Manifest;
use jiffy_content::model::vm::Root;
use jiffy_content::snapshots::draft::Draft;
use jiffy_content::snapshots::saved::Saved;
use jiffy_store::bounded::{Eviction, evict_one, usage};
use jiffy_sys::locked::Locked;
use jiffy_sys::priority::{AWAITED, BACKGROUND, lowered};
use jiffy_vmhost::handle::VmHandle;
use jiffy_wire::api::{Action, ErrorKind, ImageSource, Snapshot, Subject, VmState};
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::RwLockReadGuard;
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

/// How long after a guest is ready its reads still count as part of the boot, because its first
/// command starts then.
const BOOT_TIME: Duration = Duration::from_secs(3);
/// Longest time for which trimming waits for VMs that start.
const MOST_DELAY: Duration = Duration::from_secs(5);
/// How long after an attempt that could not lock out VMs that begin the next one is made.
const RETRY: Duration = Duration::from_secs(1);

/// A VM is beginning, or a disk is being opened.
struct Busy;

/// Keeps the caches within their limit, and no disk open whose cache is gone: checks at the start,
/// after an image was made, pulled or removed or a snapshot removed, and after each VM that used a lazy
/// disk.
pub(super) async fn keep_caches_small(node: Arc<Node>) {
    loop {
        node.trim.notified().await;
        node.host.pager.close_removed_disks().await;
        // A launch has priority, but the disk must not fill on a node that always starts VMs.
        let _ = timeout(MOST_DELAY, node.wait_until_none_starting()).await;
        while let Err(Busy) = node.trim_caches().await {
            sleep(RETRY).await;
        }
    }
}

impl Node {
    /// Opens the lazy root file system of a VM in the pager.
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
            let _ = timeout(BOOT_TIME, over).await;
            pager.end_recording(&disk).await;
            let _ = view.wait_for(|view| !view.is_active()).await;
            trim.notify_one();
        });
        Ok(())
    }

    /// Opens the disk of a root file system, if it is lazy.
    pub(crate) async fn provide_disk(&self, root: &Root) -> Result<()> {
        match &root.lazy {
            Some(disk) => self.host.pager.open_disk(disk).await,
            None => Ok(()),
        }
    }

    /// While this is held, no disk that is open is closed, and none is trimmed after it was opened.
    pub(crate) async fn hold_disks(&self) -> RwLockReadGuard<'_, ()> {
        self.beginning.read().await
    }

    /// Something was fetched, so the caches may exceed their limit; or something was removed, and with it
    /// a cache.
    pub(crate) fn caches_changed(&self) {
        self.trim.notify_one();
    }

    /// Trims the caches to their limit.
    ///
    /// Only data that no VM uses is evicted. A disk that is open in the pager is closed first,
    /// unless a VM uses it or is about to.
    async fn trim_caches(&self) -> std::result::Result<(), Busy> {
        let paths = &self.host.paths;
        let limit = match self.cache.of_disk(&paths.data) {
            Ok(limit) => limit,
            Err(error) => {
                warn!(%error, "the size of the data folder's file system can't be determined: caches are not trimmed");
                return Ok(());
            }
        };
        let all = paths.clone();
        let size = move || lowered(BACKGROUND, || usage(&caches(&all)));
        let over = tokio::task::spawn_blocking(move || size() > limit).await;
        if !over.unwrap_or(false) {
            return Ok(());
        }
        let (mut first, mut last) = (None, u64::MAX);
        // One cache at a time, because VMs that open a disk wait meanwhile.
        while let Some(kept) = self.evict_one(limit).await? {
            let before = *first.get_or_insert(kept.before);
            let goes_on = kept.after > limit && !kept.dropped.is_empty() && kept.before < last;
            last = kept.before;
            if goes_on {
                continue;
            }
            let after = kept.after;
            if after < before {
                info!(
                    limit,
                    before, after, "unused chunks were evicted from the caches"
                );
            }
            break;
        }
        Ok(())
    }

    /// Drops data of one cache; `None` if it failed.
    async fn evict_one(&self, limit: u64) -> std::result::Result<Option<Eviction>, Busy> {
        let (standbys, trimming) = {
            // Not waited for: VMs that begin later would wait, too, and a registry may be slow.
            let _alone = self.beginning.try_write().map_err(|_| Busy)?;
            let used = self.used_disks();
            let pager = &self.host.pager;
            let trimming = pager.begin_trimming(|name| used.contains(name));
            let trimming = trimming.ok_or(Busy)?;
            (self.goldens.take_lazy_standbys(), trimming)
        };
        // From here on other VMs may start: only one that opens a disk waits for the rest.
        for standby in standbys {
            standby.end().await;
        }
        let all = self.host.paths.clone();
        let evict = move || lowered(AWAITED, || evict_one(limit, &caches(&all)));
        let Some(evicted) = trimming.close_and_run(evict).await else {
            return Ok(None);
        };
        let evicted = evicted.inspect_err(|error| warn!(%error, "a cache can't be trimmed"));
        Ok(evicted.ok())
    }

    /// Tells the pager that an image's origins or the access to them have changed.
    pub(crate) async fn renew_origins(&self, disk: &LazyDisk) {
        self.host.pager.renew_origins(disk).await;
    }

    /// As [`Node::renew_origins`], for a snapshot's memory and root file system.
    pub(crate) async fn renew_snapshot_origins(&self, name: &str) {
        let Ok(saved) = self.snapshots.find(name) else {
            return;
        };
        self.host.pager.renew_memory(&saved.memory()).await;
        if let Some(disk) = &saved.manifest.lazy_root {
            self.renew_origins(disk).await;
        }
    }

    /// Fetches all missing chunks of a root file system, because a capture must not need a
    /// registry. It stays complete while the result is held, even if the VM ends.
    pub(super) async fn complete_root(&self, root: &Root) -> Result<Option<Locked>> {
        match &root.lazy {
            Some(disk) => self.host.pager.complete_disk(disk).await.map(Some),
            None => Ok(None),
        }
    }

    /// The snapshot of this name.
    pub(crate) fn saved_snapshot(&self, name: &str) -> Result<Saved> {
        self.snapshots.find(name)
    }

    /// The snapshot that was pulled by this reference, and its source; `None` if it is damaged, so
    /// that a pull replaces it.
    pub(crate) fn pulled_snapshot(&self, name: &str) -> Option<(Snapshot, ImageSource)> {
        let saved = self.snapshots.usable(name).ok()?;
        let source = saved.manifest.source.clone();
        let source = source.filter(|source| source.manifest.is_some())?;
        Some((saved.shown(name, false, Vec::new()), source))
    }

    /// Records who has signed the image or snapshot pulled by this reference, if it still has
    /// this manifest: blocking.
    pub(crate) fn note_signed(
        &self,
        name: &str,
        manifest: &str,
        signed_by: &[String],
    ) -> Result<()> {
        if signed_by.is_empty() || self.images.note_signed(name, manifest, signed_by)? {
            return Ok(());
        }
        let _one = self.snapshots.lease_for_rewrite(name)?;
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

    /// Gives a pulled snapshot its name; fails if a VM needs the one that has it.
    pub(crate) async fn keep_snapshot(
        self: &Arc<Self>,
        name: &str,
        draft: Draft,
        manifest: &Manifest,
    ) -> Result<Snapshot> {
        if self.snapshots.has(name) {
            self.remove_snapshot(name).await?;
        }
        let (to, manifest) = (self.snapshots.path(name), manifest.clone());
        let named = tokio::task::spawn_blocking(move || draft.name(&to, &manifest, false));
        let saved = super::operation::join_result(named.await)?;
        self.host
            .events
            .publish(Subject::Snapshot, Action::Created, name);
        Ok(saved.shown(name, false, Vec::new()))
    }

    /// Closes disks that no running or hibernated VM uses.
    pub(super) async fn close_disks(&self) {
        let used = self.used_disks();
        let pager = &self.host.pager;
        pager.close_disks(|name| used.contains(name)).await;
    }

    /// The disks of running and hibernated VMs.
    fn used_disks(&self) -> HashSet<String> {
        let mut used = HashSet::new();
        for vm in self.registry.all() {
            let view = vm.view.borrow();
            let root = view.root.as_ref().filter(|_| view.lives());
            used.extend(
                root.and_then(|root| root.lazy.as_ref())
                    .map(|lazy| lazy.name()),
            );
        }
        used
    }
}
