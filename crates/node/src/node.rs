//! The node: what requests come down to.

use crate::clock::{boot_id, monotonic_ns};
use crate::digests::Digests;
use crate::error::{Error, Result};
use crate::golden::standby::Standby;
use crate::golden::{self, Goldens};
use crate::images::Images;
use crate::images::base::BASE;
use crate::images::import::Which;
use crate::kernels::Kernels;
use crate::names;
use crate::options::Options;
use crate::pager::Pager;
use crate::paths::Paths;
use crate::registry::Registry;
use crate::roots;
use crate::snapshots::Snapshots;
use crate::spec;
use crate::vm::clients::Cursor;
use crate::vm::record::{MainEnd, MainState, Root, Spec, VmRecord};
use crate::vm::{Command, View, VmHandle, actor, adopt};
use crate::volumes::Volumes;
use jiffy_wire::api::{
    self, CreateVm, Image, ImageSource, MakeVolume, NodeInfo, Pruned, ResizedVolume, Vm, VmState,
    Volume,
};
use jiffy_wire::timeline::Timeline;
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::timeout;
use tracing::{info, warn};

/// How long a new VM waits for a name whose holder is on its way out.
const NAME_TIME: Duration = Duration::from_secs(10);
/// How often something is asked for that is free in a moment.
const LEASE_POLL: Duration = Duration::from_millis(5);
/// How long VMs' tasks have to write down what isn't yet, at the end.
const FLUSH_TIME: Duration = Duration::from_secs(2);

mod beginning;
mod commit;
mod fork;
mod lazy;
mod operation;
mod sleep;
mod snapshot;

pub use operation::to_the_end;

/// What every VM's task needs to know.
#[derive(Debug)]
pub struct Settings {
    /// Where files are.
    pub paths: Paths,
    /// Boot id of the host's kernel.
    pub clock: String,
    /// What a guest has to get ready.
    pub start_timeout: Duration,
    /// Who serves compressed memory.
    pub pager: Arc<Pager>,
    /// Snapshots kept for later runs.
    pub goldens: Goldens,
}

/// A node.
#[derive(Debug)]
pub struct Node {
    settings: Arc<Settings>,
    registry: Arc<Registry>,
    /// Images of root file systems.
    images: Images,
    /// Kernels.
    pub kernels: Kernels,
    /// Volumes.
    pub volumes: Arc<Volumes>,
    /// Snapshots that users made.
    snapshots: Snapshots,
    /// Of the files VMs are made of.
    digests: Arc<Digests>,
    /// Somebody wants the daemon to end.
    pub shutdown: Notify,
}

impl Node {
    /// Reads what is on disk and adopts what still runs.
    pub async fn open(paths: Paths, options: &Options) -> anyhow::Result<Arc<Node>> {
        let digests = Arc::<Digests>::default();
        let (goldens, wishes, wanted) = Goldens::new(paths.golden(), options.standby as usize);
        let node = Node {
            images: Images::new(&paths, options.registry.clone()),
            kernels: Kernels::new(&paths, Arc::clone(&digests)),
            volumes: Arc::new(Volumes::new(paths.volumes())),
            snapshots: Snapshots::new(paths.snapshots()),
            digests,
            settings: Arc::new(Settings {
                pager: Pager::new(paths.clone()),
                goldens,
                paths,
                clock: boot_id(),
                start_timeout: Duration::from_secs(options.start_timeout.into()),
            }),
            registry: Arc::default(),
            shutdown: Notify::new(),
        };
        node.sweep();
        adopt::all(&node.settings, &node.registry, &node.volumes).await?;
        node.settings.goldens.read(&node.digests);
        let node = Arc::new(node);
        tokio::spawn(golden::make_wanted(Arc::clone(&node), wishes));
        tokio::spawn(golden::standby::keep(Arc::clone(&node), wanted));
        Ok(node)
    }

    /// Removes what an earlier daemon was making or removing when it ended.
    fn sweep(&self) {
        let paths = &self.settings.paths;
        for folder in [
            paths.vms(),
            paths.images(),
            paths.volumes(),
            paths.kernels(),
            paths.snapshots(),
            paths.golden(),
            paths.chunks(),
        ] {
            let Ok(entries) = fs::read_dir(&folder) else {
                continue;
            };
            for entry in entries.flatten() {
                let path = entry.path();
                if !entry.file_name().to_string_lossy().starts_with('.') {
                    continue;
                }
                info!(path = %path.display(), "removing what an earlier daemon left half done");
                let _ = fs::remove_dir_all(&path).or_else(|_| fs::remove_file(&path));
            }
        }
    }

    /// Has every VM's task write down what isn't yet.
    pub async fn flush(&self) {
        let flushed = async {
            for vm in self.registry.all() {
                let _ = vm.ask(Command::Flush).await;
            }
        };
        if timeout(FLUSH_TIME, flushed).await.is_err() {
            warn!("not every VM's record was written in time");
        }
        self.settings.goldens.end_standbys().await;
        self.close_disks().await;
        self.settings.pager.end_if_idle().await;
    }

    // ---- for golden snapshots --------------------------------------------

    pub(crate) fn goldens(&self) -> &Goldens {
        &self.settings.goldens
    }

    pub(crate) fn paths(&self) -> &Paths {
        &self.settings.paths
    }

    pub(crate) async fn image_root(&self, image: &str) -> Result<Root> {
        Ok(self.images.find(image).await?.root)
    }

    pub(crate) fn start_timeout(&self) -> Duration {
        self.settings.start_timeout
    }

    pub(crate) fn new_cid(&self) -> u32 {
        self.registry.new_cid()
    }

    pub(crate) fn digests(&self) -> &Digests {
        &self.digests
    }

    /// Files whose contents decide what a booted guest is, but for its image.
    pub(crate) fn golden_parts(&self, kernel: &Path) -> [PathBuf; 3] {
        let paths = &self.settings.paths;
        [kernel.to_owned(), paths.initramfs(), paths.vmm()]
    }

    /// The key of VMs of this shape; digests are computed if they have to be.
    pub(crate) async fn golden_key(&self, shape: &Spec) -> Result<Option<String>> {
        let kernel = self.kernels.find(&shape.kernel)?;
        let image = self.images.find(&shape.image).await?;
        let (digests, parts) = (Arc::clone(&self.digests), self.golden_parts(&kernel));
        let computed = tokio::task::spawn_blocking(move || {
            for path in parts {
                digests
                    .of(&path)
                    .map_err(|error| Error::io("compute a file's digest", &path, &error))?;
            }
            Ok(())
        });
        operation::joined(computed.await)?;
        Ok(golden::key(self, shape, &kernel, &image.root.digest))
    }

    /// Was the image of this shape removed meanwhile?
    pub(crate) async fn golden_image_is_gone(&self, shape: &Spec) -> bool {
        self.images.find(&shape.image).await.is_err()
    }

    /// Is some VM about to get ready?
    pub(crate) fn is_starting(&self) -> bool {
        let starts = |vm: &VmHandle| vm.view.borrow().vm.state == VmState::Starting;
        self.registry.any(starts).is_some()
    }

    /// About the node itself.
    pub fn info(&self) -> NodeInfo {
        let mut all = self.registry.all();
        all.retain(|vm| !vm.spec.hidden);
        let running = all.iter().filter(|vm| vm.view.borrow().is_active()).count();
        NodeInfo {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            api: api::VERSION,
            pid: std::process::id(),
            clock: self.settings.clock.clone(),
            now_ns: monotonic_ns(),
            data: self.settings.paths.data.display().to_string(),
            running: running as u32,
            vms: all.len() as u32,
            standbys: self.settings.goldens.standbys(),
        }
    }

    /// A VM by name, id or unique beginning of an id.
    pub fn find(&self, wanted: &str) -> Result<Arc<VmHandle>> {
        let vm = self.registry.find(wanted)?;
        match vm.spec.hidden {
            false => Ok(vm),
            true => Err(Error::not_found(format!("There is no VM {wanted}."))),
        }
    }

    /// VMs, the oldest first: all, or those that have begun and not ended.
    pub fn list(&self, all: bool) -> Vec<Vm> {
        let mut handles = self.registry.all();
        handles.retain(|vm| !vm.spec.hidden);
        let views = handles.iter().map(|vm| vm.view.borrow());
        views
            .filter(|view| all || view.lives())
            .map(|view| view.vm.clone())
            .collect()
    }

    /// Makes a VM; it is on disk when this returns.
    pub async fn create(&self, wanted: CreateVm) -> Result<Arc<VmHandle>> {
        let (chosen, spec) = self.specify(wanted).await?;
        let vm = self.make_vm(chosen, spec, None).await?;
        match vm.ask(Command::Save).await? {
            Ok(()) => Ok(vm),
            Err(error) => {
                self.discard(&vm).await;
                Err(error)
            }
        }
    }

    /// Makes a VM and starts it, with a client attached from the start. Its
    /// record reaches the disk while the guest boots.
    pub async fn run(&self, wanted: CreateVm) -> Result<(Arc<VmHandle>, Cursor)> {
        let received_ns = monotonic_ns();
        let (chosen, spec) = self.specify(wanted).await?;
        let standby = self.standby_for(&spec).await;
        let vm = self.make_vm(chosen, spec, standby.as_ref()).await?;
        let cursor = Cursor::new(&vm.clients);
        match self.begin(&vm, standby, received_ns).await {
            Ok(()) => Ok((vm, cursor)),
            Err(error) => {
                self.discard(&vm).await;
                Err(error)
            }
        }
    }

    /// The name that was chosen for a VM, if one was, and what it is made of.
    async fn specify(&self, wanted: CreateVm) -> Result<(Option<String>, Spec)> {
        let chosen = wanted.name.clone();
        let spec = match wanted.from.clone() {
            Some(name) => {
                let saved = self.snapshots.find(&name)?;
                spec::from_snapshot(&name, &saved.manifest, wanted)?
            }
            None => {
                let image = wanted.image.as_deref().unwrap_or(BASE);
                let image = self.images.resolve(image, wanted.registry.as_deref());
                spec::check(wanted.clone(), &image.await?)?
            }
        };
        Ok((chosen, spec))
    }

    /// A VM restored ahead that this one can be.
    async fn standby_for(&self, spec: &Spec) -> Option<Standby> {
        // A limit belongs to a disk from its beginning.
        let shape = spec::golden(spec).filter(|_| spec.root_limit.is_none())?;
        let kernel = self.kernels.find(&spec.kernel).ok()?;
        let image = self.images.find(&spec.image).await.ok()?;
        let key = golden::key(self, &shape, &kernel, &image.root.digest)?;
        self.settings.goldens.take_standby(&key)
    }

    /// Does a VM from the wanted snapshot have a command that runs?
    pub fn has_captured_command(&self, wanted: &CreateVm) -> Result<bool> {
        match &wanted.from {
            Some(name) => Ok(self.snapshots.find(name)?.manifest.has_main()),
            None => Ok(false),
        }
    }

    /// Makes a VM that is described in full.
    async fn make_vm(
        &self,
        chosen: Option<String>,
        spec: Spec,
        standby: Option<&Standby>,
    ) -> Result<Arc<VmHandle>> {
        let (id, cid) = match standby {
            Some(standby) => (standby.id.clone(), standby.cid),
            None => (names::new_id(), self.new_cid()),
        };
        let name = chosen.clone().unwrap_or_else(names::made_up);
        let record = VmRecord::new(id, name, spec, cid);
        // The VM is known before its image is looked up: from here on the
        // image can't be removed.
        let vm = self.register(record, chosen.is_some()).await?;
        match self.provide(&vm, standby.is_some()).await {
            Ok(()) => Ok(vm),
            Err(error) => {
                self.discard(&vm).await;
                Err(error)
            }
        }
    }

    async fn register(&self, mut record: VmRecord, chosen: bool) -> Result<Arc<VmHandle>> {
        let deadline = tokio::time::Instant::now() + NAME_TIME;
        loop {
            // The task of a VM that isn't inserted ends with its handle.
            let vm = actor::create(
                Arc::clone(&self.settings),
                Arc::clone(&self.registry),
                record.clone(),
                false,
            );
            let holder = match self.registry.insert(Arc::clone(&vm)) {
                Ok(()) => return Ok(vm),
                Err(holder) => holder,
            };
            if !chosen {
                record.name = format!("{}-{}", names::made_up(), names::suffix());
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

    async fn provide(&self, vm: &VmHandle, has_folder: bool) -> Result<()> {
        let mut made = Vec::new();
        let mut image = None;
        if vm.spec.from.is_none() && !vm.spec.own_volumes {
            image = Some(self.images.find(&vm.spec.image).await?.root.path);
            self.kernels.find(&vm.spec.kernel)?;
            made = self.volumes.provide(&vm.spec.disks)?;
        }
        if has_folder {
            return Ok(());
        }
        let folder = self.settings.paths.vm(&vm.id);
        fs::DirBuilder::new()
            .mode(0o700)
            .create(&folder)
            .map_err(|error| {
                self.volumes.discard(&made);
                Error::io("make the VM's folder", &folder, &error)
            })?;
        let (Some(image), true) = (image, vm.spec.root_disk.is_some()) else {
            return Ok(());
        };
        let spec = Arc::clone(&vm.spec);
        let work = tokio::task::spawn_blocking(move || roots::make(&folder, &spec, &image));
        // The folder goes with the VM.
        operation::joined(work.await).inspect_err(|_| self.volumes.discard(&made))
    }

    async fn discard(&self, vm: &VmHandle) {
        let _ = vm.ask(|reply| Command::Remove(true, reply)).await;
    }

    /// Waits until a VM that was started is ready, or has ended, and that is
    /// on disk; an end out of order is an error.
    pub async fn started(&self, vm: &VmHandle) -> Result<Vm> {
        let view = vm
            .when(|view| {
                use VmState::{Exited, Hibernated, Paused, Running};
                matches!(view.vm.state, Running | Paused | Exited | Hibernated)
            })
            .await;
        let failed = match (&view.failure, &view.main) {
            (Some(failure), _) => Some((failure.message.clone(), failure.hint.clone())),
            (None, MainState::Ended(MainEnd::Failed(error))) => Some((error.message.clone(), None)),
            _ => None,
        };
        match failed {
            Some((message, hint)) => {
                let mut error = Error::vm_failed(message);
                error.0.hint = hint;
                Err(error)
            }
            None => {
                if !view.removed && !vm.spec.remove {
                    vm.ask(Command::Save).await??;
                }
                Ok(view.vm)
            }
        }
    }

    /// The timeline of a VM, also of one that was removed not long ago.
    pub async fn timeline(&self, wanted: &str) -> Result<Timeline> {
        let missing = match self.find(wanted) {
            Ok(vm) => match vm.ask(Command::Timeline).await {
                Ok(timeline) => return Ok(timeline),
                Err(error) => error,
            },
            Err(error) => error,
        };
        match self.registry.remembered(wanted) {
            Some((_, timeline)) => Ok(timeline),
            None => Err(missing),
        }
    }

    /// A VM, also one that was removed not long ago.
    pub fn last_seen(&self, wanted: &str) -> Result<Vm> {
        match self.find(wanted) {
            Ok(vm) => Ok(vm.vm()),
            Err(error) => match self.registry.remembered(wanted) {
                Some((vm, _)) => Ok(vm),
                None => Err(error),
            },
        }
    }

    /// All images; the built-in one is made if it isn't there.
    pub async fn list_images(&self) -> Result<Vec<Image>> {
        if let Err(error) = self.images.find(BASE).await {
            warn!(%error, "the built-in image is missing");
        }
        self.images.list()
    }

    /// Makes an image of a tar.
    pub async fn import_image(
        &self,
        name: &str,
        registry: Option<&str>,
        tar: impl Read + Send + 'static,
        which: Which,
        source: Option<ImageSource>,
    ) -> Result<Image> {
        let name = &self.images.new_name(name, registry)?;
        self.let_image_go(name).await;
        self.images
            .import(name, tar, which, source, || self.image_unused(name))
            .await
            .inspect(|_| self.settings.goldens.forget_image(name))
    }

    /// One image, with who needs it.
    pub async fn inspect_image(&self, name: &str, registry: Option<&str>) -> Result<Image> {
        let found = self.images.resolve(name, registry).await?;
        let mut image = self.images.shown(&found)?;
        let users = self.registry.all();
        let users = users
            .iter()
            .filter(|vm| vm.spec.image == image.name && !vm.spec.hidden);
        image.used_by = users.map(|vm| vm.name.clone()).collect();
        Ok(image)
    }

    /// Ends those VMs of an image that are there for nobody, or on their way
    /// out.
    pub(crate) async fn let_image_go(&self, name: &str) {
        self.end_hidden(|spec| spec.image == name).await;
        self.wait_for_leaving(|vm| vm.spec.image == name).await;
    }

    /// Removes images that can be pulled again and that no VM needs.
    pub async fn prune_images(&self) -> Result<Pruned> {
        self.end_hidden(|spec| spec.image.contains('/')).await;
        let pruned = self.images.prune(|name| self.image_unused(name)).await?;
        for name in &pruned.names {
            self.settings.goldens.forget_image(name);
        }
        Ok(pruned)
    }

    /// Removes an image.
    pub async fn remove_image(&self, name: &str, registry: Option<&str>) -> Result<()> {
        let found = self.images.resolve(name, registry).await?;
        let name = found.name.as_str();
        self.let_image_go(name).await;
        self.images.remove(name, || self.image_unused(name)).await?;
        self.settings.goldens.forget_image(name);
        Ok(())
    }

    /// Ends the node's own VMs for which this holds: users come first.
    async fn end_hidden(&self, holds: impl Fn(&Spec) -> bool) {
        let mut hidden = self.registry.all();
        hidden.retain(|vm| vm.spec.hidden && holds(&vm.spec));
        for vm in hidden {
            self.discard(&vm).await;
        }
    }

    pub(crate) fn images(&self) -> &Images {
        &self.images
    }

    /// Refuses if a VM needs the image.
    pub(crate) fn image_unused(&self, name: &str) -> Result<()> {
        match self.registry.any(|vm| vm.spec.image == name) {
            None => Ok(()),
            Some(vm) => Err(Error::conflict(format!(
                "The image {name} is in use by the VM {}.",
                vm.name
            ))
            .hint(format!("Remove that VM first with `jiffy rm {}`.", vm.name))),
        }
    }

    /// All volumes, with the VMs they belong to.
    pub fn list_volumes(&self) -> Result<Vec<Volume>> {
        let mut volumes = self.volumes.list()?;
        for volume in &mut volumes {
            volume.attached_to = self.owners_of(&volume.name);
        }
        Ok(volumes)
    }

    /// Names of the VMs that a volume belongs to, whether they run or not.
    fn owners_of(&self, volume: &str) -> Vec<String> {
        let mut vms = self.registry.all();
        vms.retain(|vm| uses_volume(vm, volume));
        vms.iter().map(|vm| vm.name.clone()).collect()
    }

    /// Makes a volume.
    pub fn make_volume(&self, name: &str, wanted: &MakeVolume) -> Result<Volume> {
        self.volumes.create(name, wanted.size_mib, wanted.raw)?;
        self.volume(name)
    }

    fn volume(&self, name: &str) -> Result<Volume> {
        let mut volumes = self.list_volumes()?.into_iter();
        volumes
            .find(|volume| volume.name == name)
            .ok_or_else(|| Error::not_found(format!("There is no volume {name}.")))
    }

    /// Changes the size of a volume that no VM uses.
    pub async fn resize_volume(&self, name: &str, size_mib: u64) -> Result<ResizedVolume> {
        self.wait_for_leaving(|vm| uses_volume(vm, name)).await;
        // A VM that sleeps remembers how large its disk was.
        let sleeps = |vm: &VmHandle| {
            uses_volume(vm, name) && vm.view.borrow().vm.state == VmState::Hibernated
        };
        if let Some(vm) = self.registry.any(sleeps) {
            return Err(Error::conflict(format!(
                "The volume {name} is in use by the VM {}, which is hibernated.",
                vm.name
            ))
            .hint(format!(
                "Wake that VM with `jiffy wake {0}` and stop it with `jiffy stop {0}`.",
                vm.name
            )));
        }
        let volumes = Arc::clone(&self.volumes);
        let wanted = name.to_owned();
        let work = tokio::task::spawn_blocking(move || volumes.resize(&wanted, size_mib));
        let note = operation::joined(work.await)?;
        let volume = self.volume(name)?;
        Ok(ResizedVolume { volume, note })
    }

    /// Why a disk can be neither attached to nor detached from a VM that is
    /// there.
    pub fn refuse_hot_plug(&self, vm: &str, volume: &str, attach: bool) -> Error {
        let vm = match self.find(vm) {
            Ok(vm) => vm,
            Err(error) => return error,
        };
        if let Err(error) = self.volume(volume) {
            return error;
        }
        let (what, hint) = match attach {
            true => (
                "attached to",
                format!("Make a VM with --disk {volume}, or copy files with `jiffy cp`."),
            ),
            false => (
                "detached from",
                format!(
                    "The volume is free again when the VM is removed with `jiffy rm {}`.",
                    vm.name
                ),
            ),
        };
        Error::wrong_state(format!(
            "The volume {volume} can't be {what} the VM {}: a guest finds its disks when it boots, because virtio-mmio has no hot-plug.",
            vm.name
        ))
        .hint(hint)
    }

    /// Removes a volume.
    pub async fn remove_volume(&self, name: &str) -> Result<()> {
        let uses = |vm: &VmHandle| uses_volume(vm, name);
        self.wait_for_leaving(uses).await;
        match self.registry.any(uses) {
            None => self.volumes.remove(name),
            Some(vm) => Err(Error::conflict(format!(
                "The volume {name} belongs to the VM {}.",
                vm.name
            ))
            .hint(format!("Remove that VM first with `jiffy rm {}`.", vm.name))),
        }
    }

    /// Waits a little for VMs for which this holds and that are on their way
    /// out for good: the last command's VM may still be switching off.
    async fn wait_for_leaving(&self, holds: impl Fn(&VmHandle) -> bool) {
        let deadline = tokio::time::Instant::now() + NAME_TIME;
        while let Some(vm) = self
            .registry
            .any(|vm| holds(vm) && vm.view.borrow().leaving)
        {
            let gone = vm.when(|view| !view.leaving || view.removed);
            let in_time = tokio::time::timeout_at(deadline, gone).await.is_ok();
            if !in_time || tokio::time::Instant::now() >= deadline {
                return;
            }
            // It leaves the registry a moment before or after its view says so.
            tokio::time::sleep(LEASE_POLL).await;
        }
    }

    /// A VM's folder.
    pub fn folder(&self, vm: &VmHandle) -> PathBuf {
        self.settings.paths.vm(&vm.id)
    }

    /// A VM's vsock socket, once its agent is ready.
    pub async fn agent_socket(&self, vm: &VmHandle) -> Result<PathBuf> {
        let view = vm.when(|view| view.vm.state != VmState::Starting).await;
        if view.vm.state == VmState::Running {
            return Ok(self.settings.paths.vsock_socket(&vm.id));
        }
        if view.vm.state == VmState::Hibernated {
            let name = &vm.name;
            return Err(Error::wrong_state(format!("The VM {name} is hibernated."))
                .hint(format!("Wake it with `jiffy wake {name}`.")));
        }
        if let Some(failure) = &view.failure {
            return Err(Error::vm_failed(failure.message.clone()));
        }
        let name = &vm.name;
        Err(match view.vm.state {
            VmState::Stopping => Error::wrong_state(format!("The VM {name} is stopping.")),
            VmState::Paused => Error::wrong_state(format!("The VM {name} is paused."))
                .hint(format!("Let it go on with `jiffy resume {name}`.")),
            _ => Error::wrong_state(format!("The VM {name} does not run."))
                .hint(format!("Start it with `jiffy start {name}`.")),
        })
    }
}

/// Is a volume, and not a copy of one, among this VM's disks?
fn uses_volume(vm: &VmHandle, name: &str) -> bool {
    !vm.spec.own_volumes && vm.spec.disks.iter().any(|disk| disk.name == name)
}

/// MemAvailable of the host, in MiB.
pub fn available_mib() -> io::Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    text.lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .and_then(|rest| rest.trim().strip_suffix(" kB"))
        .and_then(|kib| kib.trim().parse::<u64>().ok())
        .map(|kib| kib / 1024)
        .ok_or_else(|| io::ErrorKind::InvalidData.into())
}
