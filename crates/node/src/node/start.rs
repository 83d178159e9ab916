//! Starts of VMs: looks up and holds what a VM needs, and hands it to its task.

use super::limits::{current_spec, is_resized};
use super::{NAME_TIME, Node, is_paused};
use crate::golden;
use crate::spec;
use jiffy_content::clock::monotonic_ns;
use jiffy_content::error::{Error, Result};
use jiffy_content::model::vm::{FromSnapshot, MainState, Paged, Root};
use jiffy_content::paths::volume_in;
use jiffy_content::room::memory::Amount;
use jiffy_content::roots;
use jiffy_content::snapshots::draft::clone_volumes;
use jiffy_content::snapshots::remove_atomically;
use jiffy_content::snapshots::saved::Saved;
use jiffy_content::volumes::Lease;
use jiffy_vmhost::handle::{Command, Operation, VmHandle, is_active};
use jiffy_vmhost::launch::Standby;
use jiffy_vmhost::launch::{Beginning, Handle, Plan, Restoring, SavedRam, volume_disk};
use jiffy_wire::api::{Origin, Purpose, RootDisk, VmState};
use jiffy_wire::vmm::Disk;
use std::path::PathBuf;
use std::sync::Arc;

impl Node {
    /// Starts a VM; returns when its VMM is spawned.
    ///
    /// # Errors
    ///
    /// If the VM is paused or was removed, there is no room for it, something that it is made of
    /// can't be used, or its VMM can't be started.
    pub async fn start(self: &Arc<Self>, vm: &Arc<VmHandle>, received_ns: u64) -> Result<()> {
        // Only one start at a time, so that two don't both prepare the same VM.
        let operation = self.operate_for_client(vm).await?;
        match operation.state {
            VmState::Hibernated => self.wake(vm, &operation, received_ns).await,
            VmState::Paused => Err(is_paused(vm)),
            state if is_active(state) => Ok(()),
            _ => {
                self.begin(vm, &operation, None, received_ns).await?;
                if is_resized(vm) {
                    tokio::spawn(Arc::clone(self).resize_restored(Arc::clone(vm)));
                }
                Ok(())
            }
        }
    }

    /// As [`Node::start`], for a VM that is not hibernated.
    pub(super) async fn begin(
        &self,
        vm: &Arc<VmHandle>,
        _one: &Operation<'_>,
        standby: Option<Standby>,
        received_ns: u64,
    ) -> Result<()> {
        // Reserved before anything else is held, because this may wait.
        let room = match vm.spec.hidden {
            true => None,
            false => {
                let mut spec = current_spec(vm);
                (spec.memory_mib, spec.cpus) = vm.spec.until_ready(spec.memory_mib, spec.cpus);
                let amount = Amount::of(&spec);
                Some(self.reserve(vm, Purpose::Start, amount, 1).await?)
            }
        };
        let _begins = self.hold_disks().await;
        let mut plan = match &vm.spec.from {
            Some(from) => self.prepare_from(vm, from, received_ns).await?,
            None => self.prepare(vm, received_ns).await?,
        };
        plan.room = room;
        let boots = matches!(plan.beginning, Beginning::Boot);
        match standby {
            // The standby's golden snapshot was dropped meanwhile.
            Some(standby) if boots => standby.give_up().await,
            standby => plan.standby = standby,
        }
        self.hand_over(vm, plan).await?;
        self.goldens.note_run();
        if boots {
            self.goldens.request_snapshot(vm);
        }
        Ok(())
    }

    /// Hands the plan to the VM's task. After an error the pager stops serving the VM's memory.
    pub(super) async fn hand_over(&self, vm: &VmHandle, plan: Plan) -> Result<()> {
        let ticket = plan.ticket();
        let begun = vm
            .ask(|reply| Command::Start(Box::new(plan), reply))
            .await
            .and_then(|begun| begun);
        if let (Some(ticket), true) = (ticket, begun.is_err()) {
            self.host.pager.forget(&vm.id, ticket).await;
        }
        begun
    }

    /// The plan of a VM that boots or is restored from a golden snapshot.
    pub(crate) async fn prepare(&self, vm: &VmHandle, received_ns: u64) -> Result<Plan> {
        let lookup_ns = monotonic_ns();
        let spec = &vm.spec;
        let root = self.images.startable(&spec.image).await?.root;
        self.open_root(vm, &root).await?;
        let kernel = self.kernels.find(&spec.kernel)?;
        roots::check_own(&self.host.paths.vm(&vm.id), &vm.name, spec)?;
        let volumes = self.hold_volumes(vm).await?;
        let golden = spec::golden(&current_spec(vm))
            .and_then(|shape| self.known_key(&shape, &kernel, &root))
            .and_then(|key| self.goldens.find(&key));
        self.check_layer(vm, &root)?;
        let volume_disks = self.volume_disks(vm, &volumes);
        let disks = self.disks(vm, root.path.clone(), volume_disks);
        let beginning = match golden {
            None => Beginning::Boot,
            Some(golden) => {
                let start_main = spec.command.is_some();
                Beginning::Restore(Box::new(golden::restoring(&golden, start_main)))
            }
        };
        let plan = Plan::new(kernel, root, disks, beginning, (received_ns, lookup_ns));
        Ok(Plan {
            volumes,
            low_priority: spec.hidden,
            ..plan
        })
    }

    /// The plan of a VM that is restored from a snapshot.
    async fn prepare_from(
        &self,
        vm: &Arc<VmHandle>,
        from: &FromSnapshot,
        received_ns: u64,
    ) -> Result<Plan> {
        let lookup_ns = monotonic_ns();
        let name = &from.name;
        let saved = self.snapshots.usable(name)?;
        let source = saved.manifest.source.as_ref();
        self.images.policy().check("snapshot", name, source)?;
        let what = format!("The snapshot {name}");
        let processor = &self.processor;
        processor.check(&what, saved.manifest.cpu.as_ref()).await?;
        let volume_disks = self.clones_of(vm, &saved).await?;
        let lazy = saved.manifest.lazy_root.clone();
        let root = Root {
            path: match &lazy {
                Some(disk) => disk.contents(&self.host.paths),
                None => saved.root(),
            },
            digest: saved.manifest.image_digest.clone(),
            lazy,
        };
        self.open_root(vm, &root).await?;
        let disks = self.disks(vm, root.path.clone(), volume_disks);
        let memory = self.memory_of(vm, &saved, true).await?;
        let kernel = self.kernel_file(&vm.spec.kernel);
        let beginning = Beginning::Restore(Box::new(Restoring {
            start_main: from.start_main,
            ..Restoring::new(
                Some(Origin::From(name.clone())),
                Handle::Path(saved.state()),
                memory,
            )
        }));
        let times = (received_ns, lookup_ns);
        Ok(Plan::new(kernel, root, disks, beginning, times))
    }

    /// RAM of a captured VM for this VM; tells the pager to serve it if needed.
    pub(super) async fn memory_of(
        &self,
        vm: &VmHandle,
        saved: &Saved,
        record: bool,
    ) -> Result<SavedRam> {
        if saved.is_mapped() {
            return Ok(SavedRam::of_file(saved.memory()));
        }
        let recording = saved.recording();
        let paged = Paged {
            image: saved.memory(),
            // The first restore is recorded, to find the working set.
            record: (record && !recording.exists()).then_some(recording),
            prefetch: saved.manifest.optimised,
        };
        let serving = self.host.pager.serve(&vm.id, &paged).await?;
        Ok(SavedRam::Paged { serving, paged })
    }

    /// Clones a snapshot's volumes for a VM.
    async fn clones_of(&self, vm: &VmHandle, saved: &Saved) -> Result<Vec<Disk>> {
        if vm.spec.disks.is_empty() && vm.spec.root_disk.is_none() {
            return Ok(Vec::new());
        }
        let folder = self.host.paths.vm(&vm.id);
        let names = vm.spec.disks.iter().map(|disk| disk.name.as_str());
        let root = vm.spec.root_disk.iter().map(|_| roots::NAME);
        let files: Vec<(String, PathBuf)> = names
            .chain(root)
            .map(|name| (name.to_owned(), saved.volume(name)))
            .collect();
        let to = folder.clone();
        let cloned = tokio::task::spawn_blocking(move || {
            // Changes of an earlier run don't fit the memory that is restored.
            let _ = remove_atomically(&to.join("volumes"));
            let files = files
                .iter()
                .map(|(name, path)| (name.as_str(), path.as_path()));
            clone_volumes(&to, files)
        });
        super::operation::join_result(cloned.await)?;
        Ok(self.volume_disks(vm, &[]))
    }

    /// The disks of a VM's volumes: those it holds, or its own clones.
    pub(super) fn volume_disks(&self, vm: &VmHandle, held: &[Lease]) -> Vec<Disk> {
        if vm.spec.own_volumes {
            let folder = self.host.paths.vm(&vm.id);
            let of = |disk: &jiffy_wire::api::VolumeUse| {
                volume_disk(disk, volume_in(&folder, &disk.name))
            };
            return vm.spec.disks.iter().map(of).collect();
        }
        held.iter()
            .zip(&vm.spec.disks)
            .map(|(lease, disk)| volume_disk(disk, lease.path.clone()))
            .collect()
    }

    /// All disks of a VM: the image of its root, its volumes, and its own root disk.
    pub(super) fn disks(&self, vm: &VmHandle, image: PathBuf, volumes: Vec<Disk>) -> Vec<Disk> {
        roots::disks(&self.host.paths.vm(&vm.id), &vm.spec, image, volumes)
    }

    /// Refuses to mount a VM's layer over another image than the one it was made for.
    fn check_layer(&self, vm: &VmHandle, now: &Root) -> Result<()> {
        let before = vm.view.borrow().root.clone();
        match (&vm.spec.root_disk, before) {
            (Some(RootDisk::Layer { .. }), Some(before)) if before.digest != now.digest => {
                Err(Error::wrong_state(format!(
                    "The image {} was replaced: the root disk of the VM {} fits only the previous one.",
                    vm.spec.image, vm.name
                ))
                .hint("Create a new VM. To read the disk of this one, import or pull the previous image under that name again."))
            }
            _ => Ok(()),
        }
    }

    /// The kernel's file, for uses where it need not exist.
    pub(crate) fn kernel_file(&self, name: &str) -> PathBuf {
        self.kernels
            .find(name)
            .unwrap_or_else(|_| self.host.paths.kernels().join(name).join("vmlinux"))
    }

    /// Takes leases on a VM's volumes. Waits for a VM that holds one and is ending: the last
    /// command's VM may still be powering off.
    async fn hold_volumes(&self, vm: &VmHandle) -> Result<Vec<Lease>> {
        if vm.spec.own_volumes || vm.spec.disks.is_empty() {
            return Ok(Vec::new());
        }
        let deadline = tokio::time::Instant::now() + NAME_TIME;
        let mut events = self.host.events.subscribe();
        loop {
            let error = match self.volumes.hold(&vm.spec.disks, &vm.name) {
                Ok(leases) => return Ok(leases),
                Err(error) => error,
            };
            let users = self.volumes.users(&vm.spec.disks);
            let wait = users.iter().any(|user| self.is_ending(user));
            // A VM's leases are released before its end is published.
            let ended = tokio::time::timeout_at(deadline, events.vm_ends());
            if !wait || ended.await.is_err() {
                return Err(error);
            }
        }
    }

    /// Is the VM of this name ending or gone?
    pub(super) fn is_ending(&self, name: &str) -> bool {
        self.registry.named(name).is_none_or(|vm| {
            let view = vm.view.borrow();
            let over = matches!(view.main, MainState::Ended(_));
            over || view.vm.state == VmState::Stopping || !view.lives()
        })
    }

    /// The root file system that a VM runs on, if other VMs can use it, too.
    pub(super) async fn root_of(&self, vm: &VmHandle) -> Result<Root> {
        let root = vm.view.borrow().root.clone();
        let in_images = |root: &Root| root.path.starts_with(self.host.paths.images());
        match root {
            Some(root) if !in_images(&root) && root.path.exists() => Ok(root),
            root => {
                let now = self.images.find(&vm.spec.image).await?.root;
                if root.is_some_and(|root| root.digest != now.digest) {
                    return Err(Error::wrong_state(format!(
                        "The image {} was replaced after the VM {} was started: the VM can't be captured.",
                        vm.spec.image, vm.name
                    ))
                    .hint("Stop the VM and start it again."));
                }
                Ok(now)
            }
        }
    }
}
