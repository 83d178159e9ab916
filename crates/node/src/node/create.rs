//! Makes new VMs, completely or not at all.

use super::{NAME_TIME, Node, operation, run_to_completion};
use crate::spec;
use jiffy_content::clock::monotonic_ns;
use jiffy_content::error::{Error, Result};
use jiffy_content::images::base::BASE;
use jiffy_content::model::vm::{Root, Spec, VmRecord};
use jiffy_content::names;
use jiffy_content::roots;
use jiffy_vmhost::clients::Cursor;
use jiffy_vmhost::folders;
use jiffy_vmhost::handle::{Command, View, VmHandle};
use jiffy_vmhost::launch::Standby;
use jiffy_vmhost::network::Network;
use jiffy_vmhost::task;
use jiffy_wire::api::{Action, CreateVm, RootDisk};
use std::fs;
use std::future::Future;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::runtime::Handle;
use tokio::task::block_in_place;
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

/// Gives back the link that was prepared for a VM with this id, if it is dropped before the VM is
/// registered: its name is in use, or the client left.
struct Unregistered<'a> {
    network: &'a Network,
    id: &'a str,
    is_registered: bool,
}

impl Drop for Unregistered<'_> {
    fn drop(&mut self) {
        if !self.is_registered {
            self.network.forget(self.id);
        }
    }
}

impl Node {
    /// Makes a VM; its record is on disk when this returns.
    ///
    /// # Errors
    ///
    /// If the request is not valid, its name is taken, its image, snapshot, kernel or a volume
    /// can't be used, or a file can't be made. Nothing is left then.
    pub async fn create(self: &Arc<Self>, wanted: CreateVm) -> Result<Arc<VmHandle>> {
        let (chosen, spec) = self.specify(wanted).await?;
        let vm = self
            .register_vm(chosen, spec, names::new_id(), None)
            .await?;
        let (node, made) = (Arc::clone(self), Arc::clone(&vm));
        let rest = async move {
            let _one = made.operate().await;
            node.create_files(&made, false).await?;
            made.ask(Command::Save).await?
        };
        self.finish_for_client(&vm, rest).await?;
        Ok(vm)
    }

    /// Makes a VM and starts it, with a client attached from the start. Its record is written
    /// while the guest boots.
    ///
    /// # Errors
    ///
    /// As in [`Node::create`], or if there is no room for it or its VMM can't be started. Nothing
    /// is left then.
    pub async fn run(self: &Arc<Self>, wanted: CreateVm) -> Result<(Arc<VmHandle>, Cursor)> {
        let received_ns = monotonic_ns();
        let (chosen, spec) = self.specify(wanted).await?;
        let standby = self.standby_for(&spec).await;
        let id = match &standby {
            Some(standby) => standby.id.clone(),
            None => self.new_id(&spec),
        };
        let mut unregistered = Unregistered {
            network: &self.host.network,
            id: &id,
            is_registered: false,
        };
        let known = self.register_vm(chosen, spec, id.clone(), standby.as_ref());
        let vm = known.await?;
        unregistered.is_registered = true;
        drop(unregistered);
        let cursor = Cursor::new(&vm.clients);
        let (node, made) = (Arc::clone(self), Arc::clone(&vm));
        let rest = async move {
            let one = made.operate().await;
            node.create_files(&made, standby.is_some()).await?;
            node.begin(&made, &one, standby, received_ns).await
        };
        self.finish_for_client(&vm, rest).await?;
        Ok((vm, cursor))
    }

    /// The name that was chosen for a VM, if any, and its specification.
    async fn specify(&self, wanted: CreateVm) -> Result<(Option<String>, Spec)> {
        let chosen = wanted.name.clone();
        let spec = match wanted.from.clone() {
            Some(name) => {
                let saved = self.snapshots.find(&name)?;
                spec::from_snapshot(&name, &saved.manifest, wanted, self.network())?
            }
            None => {
                let image = wanted.image.as_deref().unwrap_or(BASE);
                let image = self.images.resolve(image, wanted.registry.as_deref());
                spec::check(wanted.clone(), &image.await?, self.network())?
            }
        };
        Ok((chosen, spec))
    }

    /// A standby that can become a VM with this specification.
    async fn standby_for(&self, spec: &Spec) -> Option<Standby> {
        // A run that has to wait in the queue takes no standby from others.
        let fits = !self.host.room.has_waiting();
        let shape = spec::golden(spec).filter(|_| fits)?;
        let kernel = self.kernels.find(&spec.kernel).ok()?;
        let image = self.images.find(&spec.image).await.ok()?;
        let key = self.known_key(&shape, &kernel, &image.root)?;
        self.goldens.take_standby(&key)
    }

    /// Is there a running first command in the snapshot that this VM is made from?
    ///
    /// # Errors
    ///
    /// If there is no such snapshot, or it can't be read.
    pub fn has_captured_command(&self, wanted: &CreateVm) -> Result<bool> {
        match &wanted.from {
            Some(name) => Ok(self.snapshots.find(name)?.manifest.has_main()),
            None => Ok(false),
        }
    }

    /// Makes a VM with this complete specification.
    pub(super) async fn make_vm(
        &self,
        chosen: Option<String>,
        spec: Spec,
        standby: Option<&Standby>,
    ) -> Result<Arc<VmHandle>> {
        let id = standby.map_or_else(names::new_id, |standby| standby.id.clone());
        let vm = self.register_vm(chosen, spec, id, standby).await?;
        match self.create_files(&vm, standby.is_some()).await {
            Ok(()) => Ok(vm),
            Err(error) => {
                self.discard(&vm).await;
                Err(error)
            }
        }
    }

    /// Registers a new VM without files. It is registered before its image is looked up, so that
    /// the image can't be removed from here on.
    async fn register_vm(
        &self,
        chosen: Option<String>,
        spec: Spec,
        id: String,
        standby: Option<&Standby>,
    ) -> Result<Arc<VmHandle>> {
        let cid = standby.map_or_else(|| self.new_cid(), |standby| standby.cid);
        let name = chosen.clone().unwrap_or_else(names::random_name);
        let record = VmRecord::new(id, name, spec, cid);
        self.register(record, chosen.is_some()).await
    }

    async fn register(&self, mut record: VmRecord, chosen: bool) -> Result<Arc<VmHandle>> {
        let deadline = tokio::time::Instant::now() + NAME_TIME;
        loop {
            // The task of a VM that isn't registered ends with its handle.
            let vm = task::create(
                Arc::clone(&self.host),
                Arc::clone(&self.registry),
                record.clone(),
            );
            let holder = match self.registry.insert(Arc::clone(&vm)) {
                Ok(()) => {
                    self.host.events.publish_vm(Action::Created, &record);
                    return Ok(vm);
                }
                Err(holder) => holder,
            };
            if !chosen {
                record.name = format!("{}-{}", names::random_name(), names::suffix());
                continue;
            }
            let leaving = holder.view.borrow().leaving;
            let gone = async { holder.when(|view| !view.leaving).await };
            let gone = leaving
                && tokio::time::timeout_at(deadline, gone)
                    .await
                    .is_ok_and(|view: View| view.removed);
            if !gone {
                let name = &record.name;
                return Err(Error::conflict(format!(
                    "The name {name} is in use by the VM {}.",
                    holder.id
                ))
                .hint(format!(
                    "Choose another, or remove that VM with `jiffy rm {name}`."
                )));
            }
        }
    }

    /// Makes a child of a running VM, with this complete specification. Its parent's root file
    /// system and kernel are in use already: neither has to be on this node under its name, and no
    /// signature is checked.
    pub(super) async fn make_child(
        &self,
        chosen: Option<String>,
        spec: Spec,
    ) -> Result<Arc<VmHandle>> {
        let vm = self
            .register_vm(chosen, spec, names::new_id(), None)
            .await?;
        match self.make_folder(&vm) {
            Ok(_) => Ok(vm),
            Err(error) => {
                self.discard(&vm).await;
                Err(error)
            }
        }
    }

    fn make_folder(&self, vm: &VmHandle) -> Result<PathBuf> {
        let folder = self.host.paths.vm(&vm.id);
        fs::DirBuilder::new()
            .mode(0o700)
            .create(&folder)
            .map_err(|error| Error::io("make the VM's folder", &folder, &error))?;
        Ok(folder)
    }

    async fn create_files(&self, vm: &VmHandle, has_folder: bool) -> Result<()> {
        let mut image = None;
        if vm.spec.from.is_none() && !vm.spec.own_volumes {
            image = Some(self.images.startable(&vm.spec.image).await?.root);
            self.kernels.find(&vm.spec.kernel)?;
            self.volumes.check(&vm.spec.disks)?;
        }
        if !has_folder {
            let folder = self.make_folder(vm)?;
            if let (Some(image), true) = (&image, vm.spec.root_disk.is_some()) {
                // After an error, the disk is removed with the VM's folder.
                self.make_root_disk(vm, folder, image).await?;
            }
        }
        if image.is_some() {
            // Last, after all slow steps: other VMs can use the new volumes at once.
            let made = block_in_place(|| self.volumes.create_missing(&vm.spec.disks))?;
            for name in &made {
                self.volume_changed(name, Action::Created);
            }
        }
        Ok(())
    }

    /// Makes a VM's root disk. A copy needs the whole image, so missing chunks are fetched first.
    async fn make_root_disk(&self, vm: &VmHandle, folder: PathBuf, image: &Root) -> Result<()> {
        // Nothing of the image is evicted meanwhile.
        let _beginning = self.hold_disks().await;
        if let Some(RootDisk::Copy { .. }) = &vm.spec.root_disk {
            self.complete_root(image).await?;
        }
        let (spec, image) = (Arc::clone(&vm.spec), image.path.clone());
        let room = Arc::clone(&self.disk_room);
        let work = tokio::task::spawn_blocking(move || roots::make(&folder, &spec, &image, &room));
        operation::join_result(work.await)
    }

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
            warn!(vm = %vm.name, %error, "the files of an unfinished VM could not be removed");
        }
    }
}
