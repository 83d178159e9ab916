//! Snapshots: make, list, inspect, optimise, remove.

use super::limits::current_spec;
use super::operation::{Stopwatch, is_over, join_result, run_to_completion};
use super::{NAME_TIME, Node};
use crate::golden;
use jiffy_content::clock::{monotonic_ns, unix_seconds};
use jiffy_content::error::{Error, Result};
use jiffy_content::model::snapshot::Manifest;
use jiffy_content::model::vm::{Root, Spec};
use jiffy_content::snapshots::captured::Captured;
use jiffy_content::snapshots::draft::Draft;
use jiffy_content::snapshots::saved::{self, Saved};
use jiffy_content::snapshots::{inspect, memory};
use jiffy_sys::priority::{AWAITED, lowered};
use jiffy_vmhost::control;
use jiffy_vmhost::handle::{Command, VmHandle};
use jiffy_wire::api::{
    Action, FolderUse, MakeSnapshot, MemoryForm, MemoryReport, Origin, Priority, Pruned, Snapshot,
    SnapshotMade, Subject,
};
use jiffy_wire::cpu::Profile;
use jiffy_wire::timeline::{Track, names};
use jiffy_wire::vmm::{ControlRequest, ControlResponse};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::block_in_place;
use tokio::time::timeout;
use tracing::{debug, info, warn};

/// How long to wait for a VM whose command has ended, until the VM has ended and its recording is
/// written.
const RECORDING_TIME: Duration = Duration::from_secs(2);
/// How often it is looked for: the pager writes it without an event.
const RECORDING_POLL: Duration = Duration::from_millis(5);
/// How long a VMM has to report its guest's processor. Without it a later restore can't be refused in
/// time on a host that lacks features, so a busy VMM gets long.
const PROCESSOR_TIME: Duration = Duration::from_secs(30);

/// Where in the guest a captured VM shared folders. Whoever gets the snapshot does not learn which
/// folders of the host these were.
fn places_only(folders: &[FolderUse]) -> Vec<FolderUse> {
    let place = |folder: &FolderUse| FolderUse {
        source: String::new(),
        ..folder.clone()
    };
    folders.iter().map(place).collect()
}

impl Node {
    /// Makes a snapshot of a running VM, which keeps running unless it should stop.
    ///
    /// # Errors
    ///
    /// If the name is not valid or taken, the VM can't be captured now, missing chunks can't be
    /// fetched, or there is no disk space. There is no snapshot then, and the VM runs on.
    pub async fn snapshot(
        self: Arc<Self>,
        vm: Arc<VmHandle>,
        wanted: MakeSnapshot,
    ) -> Result<SnapshotMade> {
        let mut watch = Stopwatch::start(&self.host.clock);
        let name = wanted.name;
        self.snapshots.check_free(&name)?;
        let _one = self.operate_for_client(&vm).await?;
        self.capturable(&vm).await?;
        let root = self.root_of(&vm).await?;
        let _whole = self.complete_root(&root).await?;
        let mut manifest = self.manifest_of(&vm, &root).await?;
        let mut draft = Draft::new(self.snapshots.folder(), &self.disk_room)?;
        let started = vm.view.borrow().vm.started.unwrap_or(0);
        let before = self.snapshots.latest_of(&vm.name, started)?;
        let from = vm.spec.from.as_ref();
        if let Some(base) = before.or_else(|| Some(self.snapshots.path(&from?.name))) {
            draft.built_on(base);
        }
        draft.share_with_root(self.snapshots.root_tables());
        let volumes = self.volume_files(&vm);
        let resume = volumes.is_empty() && !wanted.stop;
        let taken = self.quiesce_and_capture(&vm, resume, &mut watch).await?;
        manifest.note_processor(self.processor_of(&vm).await);
        // Read before the guest is thawed, to match the captured state of the command.
        manifest.main = vm.view.borrow().main.clone();
        let pause_ns = taken.captured.pause_ns;
        let captured = taken.captured;
        let made = async {
            let draft = if volumes.is_empty() {
                draft
            } else {
                let start = monotonic_ns();
                let draft = clone_volumes(draft, volumes).await?;
                watch.span(Track::Node, names::VOLUMES_CLONED, start, monotonic_ns());
                draft
            };
            if !resume && !wanted.stop {
                let resumed = self.resume_vcpus(&vm).await;
                // What was captured of a VM that has been ended since is whole.
                resumed.or_else(|error| is_over(&vm).then_some(()).ok_or(error))?;
            }
            let frozen = match wanted.stop {
                true => Some(taken.frozen),
                false => {
                    drop(taken.frozen);
                    None
                }
            };
            let to = self.snapshots.folder().join(&name);
            let written = write(draft, captured, root, manifest, to, false, &mut watch).await;
            Ok((written?, frozen))
        }
        .await;
        let (saved, frozen) = match made {
            Ok(made) => made,
            Err(error) => {
                if !resume {
                    let _ = self.resume_vcpus(&vm).await;
                }
                return Err(error);
            }
        };
        info!(snapshot = name, vm = %vm.name, "snapshot made");
        self.host
            .events
            .publish(Subject::Snapshot, Action::Created, &name);
        if wanted.stop {
            // Fails if the VM was ended or removed meanwhile: then it is over, too.
            let _ = vm.ask(Command::Kill).await;
            vm.when(|view| !view.is_active()).await;
        }
        drop(frozen);
        Ok(SnapshotMade {
            snapshot: saved.shown(&name, false, Vec::new()),
            pause_ns,
            timeline: watch.stop(),
        })
    }

    /// The manifest of a captured VM. Digests of large files may have to be computed.
    pub(crate) async fn manifest_of(&self, vm: &VmHandle, root: &Root) -> Result<Manifest> {
        let digests = Arc::clone(&self.digests);
        let paths = &self.host.paths;
        let files = [
            self.kernel_file(&vm.spec.kernel),
            paths.initramfs(),
            paths.vmm(),
        ];
        let known = tokio::task::spawn_blocking(move || {
            files.map(|path| {
                digests.entry(&path).map_err(|error| {
                    Error::io("compute a file's digest for a snapshot", &path, &error)
                })
            })
        });
        let known = known.await.map_err(|error| {
            Error::internal(format!("A task of jiffyd did not finish: {error}."))
        })?;
        let [kernel, initramfs, vmm] = known;
        let files = vec![kernel?, initramfs?, vmm?];
        let view = vm.view.borrow();
        let parent = match &view.vm.origin {
            Some(Origin::From(name)) => Some(name.clone()),
            _ => None,
        };
        Ok(Manifest {
            created: unix_seconds(),
            jiffy: env!("CARGO_PKG_VERSION").to_owned(),
            vm: vm.name.clone(),
            parent,
            // Owner, wait and idle policy come from the user of the snapshot, not from the captured
            // VM.
            spec: Spec {
                folders: places_only(&vm.spec.folders),
                idle: None,
                owner: None,
                priority: Priority::Normal,
                ..current_spec(vm)
            },
            main: view.main.clone(),
            image_digest: root.digest.clone(),
            kernel_digest: files[0].digest.clone(),
            initramfs_digest: files[1].digest.clone(),
            vmm_digest: files[2].digest.clone(),
            cpu_features: Vec::new(),
            cpu: None,
            // These four are known when it is written.
            memory: MemoryForm::Image,
            memory_bytes: 0,
            shared_bytes: 0,
            other_bytes: 0,
            optimised: false,
            lazy_root: None,
            source: None,
            files,
        })
    }

    /// The processor of a captured guest; `None` if its VMM can't tell, like one of release 0.1.
    pub(super) async fn processor_of(&self, vm: &VmHandle) -> Option<Profile> {
        let socket = self.host.paths.control_socket(&vm.id);
        let asked = control::request(&socket, ControlRequest::CpuProfile);
        match timeout(PROCESSOR_TIME, asked).await {
            Ok(Ok(ControlResponse::CpuProfile(profile))) => Some(*profile),
            other => {
                debug!(vm = %vm.name, ?other, "the guest's processor is not known");
                None
            }
        }
    }

    /// The files of a VM's volumes and root disk, by name.
    pub(super) fn volume_files(&self, vm: &VmHandle) -> Vec<(String, PathBuf)> {
        let of = |disk: &jiffy_wire::api::VolumeUse| {
            let path = match vm.spec.own_volumes {
                true => jiffy_content::paths::volume_in(&self.host.paths.vm(&vm.id), &disk.name),
                false => self.volumes.file(&disk.name),
            };
            (disk.name.clone(), path)
        };
        let root = vm.spec.root_disk.iter().map(|_| {
            let path = jiffy_content::roots::file_in(&self.host.paths.vm(&vm.id));
            (jiffy_content::roots::NAME.to_owned(), path)
        });
        vm.spec.disks.iter().map(of).chain(root).collect()
    }

    /// Snapshots by name; the golden ones too, if wanted.
    ///
    /// # Errors
    ///
    /// If the folder of snapshots can't be read.
    pub fn list_snapshots(&self, all: bool) -> Result<Vec<Snapshot>> {
        let (mut readable, mut list) = (Vec::new(), Vec::new());
        for (name, saved) in self.snapshots.all()? {
            match saved {
                Ok(saved) => readable.push((name, saved)),
                Err(why) => list.push(Snapshot {
                    error: Some(saved::unusable(&name, &why)),
                    used_by: self.users_of(&name),
                    name,
                    ..Snapshot::default()
                }),
            }
        }
        let shown = |(name, saved): &(String, Saved)| self.shown_among(name, saved, &readable);
        list.extend(readable.iter().map(shown));
        list.sort_by(|one, other| one.name.cmp(&other.name));
        if all {
            let golden = self.goldens.all();
            list.extend(
                golden
                    .iter()
                    .map(|saved| saved.shown(&golden::name_of(saved), true, Vec::new())),
            );
        }
        Ok(list)
    }

    /// The snapshot of this name, which may be a golden one.
    ///
    /// # Errors
    ///
    /// If there is none, or it can't be read.
    pub fn inspect_snapshot(&self, name: &str) -> Result<Snapshot> {
        match self.any_snapshot(name)? {
            (saved, true) => Ok(saved.shown(name, true, self.users_of(name))),
            (saved, false) => Ok(self.shown_among(name, &saved, &self.snapshots.list()?)),
        }
    }

    fn shown_among(&self, name: &str, saved: &Saved, all: &[(String, Saved)]) -> Snapshot {
        let mut shown = saved.shown(name, false, self.users_of(name));
        let children = all.iter().filter(|(_, other)| saved.is_base_of(other));
        shown.children = children.map(|(name, _)| name.clone()).collect();
        shown
    }

    fn any_snapshot(&self, name: &str) -> Result<(Saved, bool)> {
        let mut golden = self.goldens.all().into_iter();
        match golden.find(|saved| golden::name_of(saved) == name) {
            Some(saved) => Ok(((*saved).clone(), true)),
            None => Ok((self.snapshots.find(name)?, false)),
        }
    }

    /// Names of the VMs that are restored from this snapshot at each start.
    fn users_of(&self, name: &str) -> Vec<String> {
        let all = self.registry.all();
        let users = all.iter().filter(|vm| is_from(vm, name));
        users.map(|vm| vm.name.clone()).collect()
    }

    /// Removes a snapshot that no VM needs, or a golden one. Once that has begun, it is done and told
    /// also if the client leaves.
    ///
    /// # Errors
    ///
    /// If there is none, a VM needs it, or it can't be removed.
    pub async fn remove_snapshot(self: &Arc<Self>, name: &str) -> Result<()> {
        if self.goldens.remove(name).await {
            return Ok(());
        }
        self.wait_for_removal(|vm| is_from(vm, name)).await;
        let deadline = tokio::time::Instant::now() + NAME_TIME;
        let mut events = self.host.events.subscribe();
        loop {
            let users = self.users_of(name);
            let Some(user) = users.first() else {
                let (node, name) = (Arc::clone(self), name.to_owned());
                return run_to_completion(async move {
                    block_in_place(|| node.snapshots.remove(&name))?;
                    let events = &node.host.events;
                    events.publish(Subject::Snapshot, Action::Removed, &name);
                    // Removes its chunks and their origins, if nothing else uses them.
                    block_in_place(|| node.images.collect_garbage());
                    node.caches_changed();
                    Ok(())
                })
                .await;
            };
            let leaving = self
                .registry
                .find(user)
                .is_ok_and(|vm| vm.view.borrow().leaving);
            let ended = tokio::time::timeout_at(deadline, events.vm_ends());
            if !leaving || ended.await.is_err() {
                return Err(Error::conflict(format!(
                    "The snapshot {name} is in use by the VM {user}."
                ))
                .hint(format!("Remove that VM first with `jiffy rm {user}`.")));
            }
        }
    }

    /// Removes all golden snapshots.
    pub async fn prune_snapshots(&self) -> Pruned {
        self.goldens.prune().await
    }

    /// What a snapshot's RAM consists of; with its ranges if wanted.
    ///
    /// # Errors
    ///
    /// If there is no such snapshot, or its memory can't be read.
    pub async fn memory_report(&self, name: &str, map: bool) -> Result<MemoryReport> {
        let (saved, _) = self.any_snapshot(name)?;
        let work = tokio::task::spawn_blocking(move || inspect::report(&saved, map));
        join_result(work.await)
    }

    /// A picture of a snapshot's RAM: a PNG.
    ///
    /// # Errors
    ///
    /// If there is no such snapshot, or its memory can't be read.
    pub async fn memory_picture(&self, name: &str) -> Result<Vec<u8>> {
        let (saved, _) = self.any_snapshot(name)?;
        let work = tokio::task::spawn_blocking(move || inspect::picture(&saved));
        join_result(work.await)
    }

    /// Rewrites a snapshot's RAM with its working set first.
    ///
    /// # Errors
    ///
    /// If there is no such snapshot, its memory is a mapped file, it has no recording or a VM uses
    /// it, missing chunks can't be fetched, or there is no disk space.
    pub async fn optimise_snapshot(self: Arc<Self>, name: String) -> Result<Snapshot> {
        // Locked, so that another snapshot can't take this name meanwhile.
        let _one = self.snapshots.lease_for_rewrite(&name)?;
        let saved = self.snapshots.find(&name)?;
        if saved.manifest.memory == MemoryForm::Raw {
            return Err(Error::wrong_state(format!(
                "The memory of the snapshot {name} is a mapped file: there is nothing to optimise."
            )));
        }
        self.wait_for_recording(&saved, &name).await?;
        let pager = &self.host.pager;
        pager.complete_memory(&saved.memory()).await?;
        // The fetch may have taken minutes, and a VM may have been started from it meanwhile.
        self.wait_for_recording(&saved, &name).await?;
        let room = Arc::clone(&self.disk_room);
        let work = tokio::task::spawn_blocking(move || {
            let mut manifest = saved.manifest.clone();
            let what = "The optimised snapshot needs about";
            // The manifest of a snapshot that was pulled counts only what was fetched then.
            let unreadable =
                |error| Error::io("read the size of a snapshot", &saved.memory(), &error);
            let bytes = memory::bytes_of(&saved.memory()).map_err(unreadable)?;
            let _room = room.reserve_bytes(&saved.folder, what, bytes)?;
            lowered(AWAITED, || {
                memory::optimise(&saved.memory(), &saved.recording())
            })?;
            manifest.optimised = true;
            manifest.memory_bytes = memory::bytes_of(&saved.memory()).map_err(unreadable)?;
            manifest
                .save(&saved.folder)
                .map_err(|error| Error::io("write a snapshot's record", &saved.folder, &error))
        });
        join_result(work.await)?;
        self.inspect_snapshot(&name)
    }

    /// Waits until the snapshot has a recording and no VM is served from it: such a VM would read
    /// the new image at the old image's offsets. The recording is written after the VM's end, which
    /// follows the answer of its command.
    async fn wait_for_recording(&self, saved: &Saved, name: &str) -> Result<()> {
        let deadline = tokio::time::Instant::now() + RECORDING_TIME;
        loop {
            let is_served = |vm: &VmHandle| is_from(vm, name) && vm.view.borrow().is_active();
            let user = self.registry.any(is_served);
            let is_ending = |user: &Arc<VmHandle>| self.is_ending(&user.name);
            let wait = user.as_ref().is_none_or(is_ending);
            let error = match user {
                Some(user) => Error::conflict(format!(
                    "The snapshot {name} is being used by the VM {}.",
                    user.name
                ))
                .hint(format!(
                    "Stop that VM first with `jiffy stop {}`.",
                    user.name
                )),
                None if saved.recording().exists() => return Ok(()),
                None => Error::wrong_state(format!(
                    "There is no recording yet of a restore of the snapshot {name}."
                ))
                .hint(format!(
                    "Run a VM with `jiffy run --from {name}` until it has done its usual work, end it, then try again."
                )),
            };
            if !wait || tokio::time::Instant::now() >= deadline {
                return Err(error);
            }
            tokio::time::sleep(RECORDING_POLL).await;
        }
    }
}

/// Is the VM restored from the snapshot of this name?
fn is_from(vm: &VmHandle, name: &str) -> bool {
    vm.spec.from.as_ref().is_some_and(|from| from.name == name)
}

async fn clone_volumes(draft: Draft, volumes: Vec<(String, PathBuf)>) -> Result<Draft> {
    let work = tokio::task::spawn_blocking(move || {
        let volumes = volumes
            .iter()
            .map(|(name, path)| (name.as_str(), path.as_path()));
        draft.clone_volumes(volumes).map(|()| draft)
    });
    join_result(work.await)
}

/// Writes a capture and names it; with `replace`, it replaces an existing snapshot of that name.
pub(super) async fn write(
    draft: Draft,
    captured: Captured,
    root: Root,
    mut manifest: Manifest,
    to: PathBuf,
    replace: bool,
    watch: &mut Stopwatch,
) -> Result<Saved> {
    // A lazy root has no file to keep.
    let root = manifest.lazy_root.is_none().then_some(root);
    let start = monotonic_ns();
    let work = tokio::task::spawn_blocking(move || {
        let written = draft.write(&captured, root.as_ref())?;
        Ok((draft, written))
    });
    let (draft, written) = join_result(work.await).inspect_err(|error| {
        warn!(%error, "a capture could not be written");
    })?;
    let end = monotonic_ns();
    watch.span(Track::Node, names::IMAGE_WRITTEN, start, end);
    manifest.memory = written.memory.form;
    manifest.memory_bytes = written.memory.bytes;
    manifest.shared_bytes = written.shared;
    manifest.other_bytes = written.other;
    let work = tokio::task::spawn_blocking(move || draft.name(&to, &manifest, replace));
    let saved = join_result(work.await)?;
    watch.span(Track::Node, names::SNAPSHOT_NAMED, end, monotonic_ns());
    Ok(saved)
}
