//! The node: implements what requests ask for.
//!
//! * `accessed`: which pages of a golden snapshot's memory a restored guest accesses.
//! * `background`: work that goes on beside requests.
//! * `balloon`: memory that a guest gives back.
//! * `commit`: makes an image of a VM's changes to its root file system.
//! * `create`: makes new VMs, completely or not at all.
//! * `damage`: logs unusable images, snapshots, volumes and kernels at the start.
//! * `events`: the stream of events for clients.
//! * `find`: finds and lists VMs, also those that were removed lately.
//! * `fork`: live clones that share the parent's memory until one of them writes.
//! * `idle`: hibernates or stops VMs that nobody uses.
//! * `images`: lists, imports, inspects and removes images.
//! * `inbound`: connections to published ports of hibernated VMs, which wake their VM.
//! * `lazy`: root file systems whose images are only partly here.
//! * `limits`: changes a VM's rate limits, number of vCPUs and memory.
//! * `make_golden`: makes golden snapshots.
//! * `networks`: networks and network policies.
//! * `operation`: steps shared by pause, snapshot, fork and hibernation.
//! * `pressure`: reclaims memory from idle VMs when the host has little left.
//! * `queue`: memory and vCPUs for starts of VMs, and the queue of requests for them.
//! * `sched_trace`: recordings of what runs on each CPU.
//! * `sleep`: hibernates and wakes VMs.
//! * `snapshot`: makes, lists, inspects, optimises and removes snapshots.
//! * `standbys`: VMs restored ahead of time.
//! * `start`: looks up and holds what a start needs, and hands it to the VM's task.
//! * `transfer`: pulls and pushes.
//! * `view`: a VM as the API shows it.
//! * `volumes`: lists, makes, resizes and removes volumes.

use crate::cpu::Processor;
use crate::golden::{self, Goldens};
use crate::idle::watch::Watches;
use jiffy_content::clock::{boot_id, monotonic_ns};
use jiffy_content::digests::Digests;
use jiffy_content::error::{Error, Result};
use jiffy_content::images::Images;
use jiffy_content::images::policy::Policy;
use jiffy_content::kernels::Kernels;
use jiffy_content::leases::Leases;
use jiffy_content::model::vm::{MainEnd, MainState, Root, Spec};
use jiffy_content::paths::Paths;
use jiffy_content::room::Limit;
use jiffy_content::room::disk;
use jiffy_content::room::memory::{self as room, Room};
use jiffy_content::snapshots::Snapshots;
use jiffy_content::transfer::Transfers;
use jiffy_content::volumes::Volumes;
use jiffy_vmhost::events::EventBus;
use jiffy_vmhost::folders::{self, Found};
use jiffy_vmhost::handle::{Command, VmHandle};
use jiffy_vmhost::host::Host;
use jiffy_vmhost::jails::Launcher;
use jiffy_vmhost::network::{self, Network};
use jiffy_vmhost::pager::Pager;
use jiffy_vmhost::registry::Registry;
use jiffy_vmhost::scheduler::Scheduler;
use jiffy_vmhost::spares::Spares;
use jiffy_vmhost::task::adopt;
use jiffy_wire::api::{self, NodeInfo, Vm, VmState};
use jiffy_wire::cpu::Profile;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Notify, RwLock};
use tokio::time::timeout;
use tracing::{info, warn};

/// How long a new VM waits for a name whose holder is being removed.
const NAME_TIME: Duration = Duration::from_secs(10);
/// How long a guest that is ready has to report its first command; it does so at once.
const REPORT_TIME: Duration = Duration::from_secs(10);
/// How long VMs' tasks have to save unsaved state when the daemon ends.
const FLUSH_TIME: Duration = Duration::from_secs(5);

mod accessed;
mod background;
mod balloon;
mod commit;
mod create;
mod damage;
mod events;
mod find;
mod fork;
mod idle;
mod images;
mod inbound;
mod lazy;
mod limits;
mod make_golden;
mod networks;
mod operation;
mod pressure;
mod queue;
mod sched_trace;
mod sleep;
mod snapshot;
mod standbys;
mod start;
mod transfer;
mod view;
mod volumes;

use pressure::Pressure;

pub use operation::{Caller, on_behalf_of, run_to_completion};

/// Configuration of a node.
#[derive(Debug)]
pub struct Config {
    /// The registry of images whose name has none.
    pub registry: Option<String>,
    /// Which keys must have signed images and snapshots from registries.
    pub policy: Policy,
    /// How long a guest has to become ready.
    pub start_timeout: Duration,
    /// Number of standbys, each of another kind.
    pub standbys: usize,
    /// Number of spares.
    pub spares: usize,
    /// Whether VMMs run in jails.
    pub jailed: bool,
    /// Limit of cached data that was fetched.
    pub cache: Limit,
    /// Most data in the memory of a hibernated VM that is not compressed, bytes.
    pub hibernate_raw: u64,
    /// Memory and vCPUs of all VMs, and the queue of requests for them.
    pub room: room::Settings,
    /// Whether `jiffy-sched` schedules the host.
    pub scheduler: bool,
    /// The operator's settings of VMs' network.
    pub network: network::Settings,
}

/// A node.
#[derive(Debug)]
pub struct Node {
    /// What the tasks of its VMs share.
    host: Arc<Host>,
    /// Golden snapshots and standbys.
    goldens: Arc<Goldens>,
    /// The features of this host's processor that guests can have.
    processor: Processor,
    /// Limit of cached data that was fetched.
    cache: Limit,
    registry: Arc<Registry>,
    /// Disk room of what is being written.
    disk_room: Arc<disk::Room>,
    /// Images of root file systems.
    images: Arc<Images>,
    /// Pulls in progress.
    transfers: Arc<Transfers>,
    /// Kernels.
    pub kernels: Kernels,
    /// Volumes.
    pub volumes: Arc<Volumes>,
    /// Snapshots that users made.
    snapshots: Arc<Snapshots>,
    /// Digests of kernels and other files that VMs are made of.
    digests: Arc<Digests>,
    /// Held for reading while a VM begins and is not yet known to use its disk; for writing while it
    /// is decided which disks are unused and closed.
    beginning: RwLock<()>,
    /// Since when VMs are idle.
    watches: Watches,
    hibernate_raw: u64,
    /// VMs from which memory is being reclaimed.
    pressure: Pressure,
    /// Notifies that the cache may exceed its limit.
    trim: Arc<Notify>,
    /// Ends a recording of what runs on each CPU.
    traced: Notify,
    /// Notifies that the daemon should end.
    pub shutdown: Notify,
}

impl Node {
    /// Reads the node's files and adopts running VMs. What can't be read, adopted or opened is logged.
    pub async fn open(paths: Paths, config: Config) -> Arc<Node> {
        let digests = Arc::<Digests>::default();
        let (goldens, snapshot_requests, standby_requests) =
            Goldens::new(paths.golden(), config.standbys);
        let goldens = Arc::new(goldens);
        let found = folders::find(&paths);
        let disk_room = Arc::<disk::Room>::default();
        let leases = Arc::<Leases>::default();
        let images = Images::new(
            &paths,
            config.registry,
            config.policy,
            Arc::clone(&disk_room),
            Arc::clone(&leases),
        );
        let scheduler = Arc::new(match config.scheduler {
            true => Scheduler::start(&paths),
            false => Scheduler::none(),
        });
        let node = Node {
            disk_room: Arc::clone(&disk_room),
            images: Arc::new(images),
            transfers: Arc::new(Transfers::new(paths.pulls())),
            kernels: Kernels::new(&paths, Arc::clone(&digests)),
            volumes: Arc::new(Volumes::new(paths.volumes(), Arc::clone(&leases))),
            snapshots: Arc::new(Snapshots::new(paths.snapshots(), leases)),
            digests,
            processor: Processor::new(paths.vmm()),
            cache: config.cache,
            host: Arc::new(Host {
                pager: Pager::new(
                    paths.clone(),
                    Arc::clone(&scheduler),
                    Arc::clone(&disk_room),
                ),
                scheduler,
                launcher: Arc::new(Launcher::new(&paths, config.jailed)),
                spares: Arc::new(Spares::new(config.spares)),
                clock: boot_id(),
                start_timeout: config.start_timeout,
                network: Network::open(&config.network, &paths, &found),
                room: Room::new(&config.room),
                goldens: Arc::clone(&goldens) as _,
                events: EventBus::default(),
                paths,
            }),
            goldens,
            registry: Arc::default(),
            beginning: RwLock::default(),
            watches: Watches::default(),
            hibernate_raw: config.hibernate_raw,
            pressure: Pressure::default(),
            trim: Arc::default(),
            traced: Notify::new(),
            shutdown: Notify::new(),
        };
        let all = Arc::downgrade(&node.registry);
        let in_use = move || {
            all.upgrade()
                .map_or(0, |all| pressure::used_mib(&all.all()))
        };
        node.host.room.measure_use(in_use);
        node.sweep(&found);
        tokio::task::spawn_blocking(jiffy_vmhost::sched_trace::remove_left_over);
        adopt::all(&node.host, &node.registry, &node.volumes, found).await;
        // Without golden snapshots the processor is not needed before the first restore.
        let host = match node.goldens.any_on_disk() {
            true => node.processor.host().await.ok(),
            false => None,
        };
        let most = host.map(|host| &host.restorable);
        node.goldens.read(&node.digests, most);
        let node = Arc::new(node);
        background::start(&node, snapshot_requests, standby_requests);
        node
    }

    /// Removes unfinished files and folders of an earlier daemon, which left these VMs.
    fn sweep(&self, vms: &[Found]) {
        let paths = &self.host.paths;
        for folder in [
            paths.vms(),
            paths.images(),
            paths.volumes(),
            paths.kernels(),
            paths.snapshots(),
            paths.golden(),
        ] {
            let Ok(entries) = fs::read_dir(&folder) else {
                continue;
            };
            for entry in entries.flatten() {
                let path = entry.path();
                if !entry.file_name().to_string_lossy().starts_with('.') {
                    continue;
                }
                info!(path = %path.display(), "removing an unfinished file or folder of an earlier daemon");
                let _ = fs::remove_dir_all(&path).or_else(|_| fs::remove_file(&path));
            }
        }
        self.kernels.sweep();
        let records = vms.iter().map(|vm| vm.record.as_ref());
        self.images
            .sweep(records.map(|kept| kept.map(|kept| &kept.record)));
    }

    /// The daemon ends: VMs that it held up run on, and every VM's task saves its unsaved state.
    pub async fn flush(self: &Arc<Self>) {
        if timeout(FLUSH_TIME, pressure::end(self)).await.is_err() {
            warn!("some VMs that were halted were not resumed in time");
        }
        let flushed = async {
            for vm in self.registry.all() {
                vm.flush().await;
            }
        };
        if timeout(FLUSH_TIME, flushed).await.is_err() {
            warn!("the records of some VMs were not written in time");
        }
        self.goldens.end_standbys().await;
        self.host.spares.end().await;
        self.close_disks().await;
        self.host.pager.end_if_idle().await;
    }

    pub(crate) fn goldens(&self) -> &Goldens {
        &self.goldens
    }

    pub(crate) fn launcher(&self) -> &Launcher {
        &self.host.launcher
    }

    pub(crate) fn network(&self) -> &Arc<Network> {
        &self.host.network
    }

    pub(crate) fn room(&self) -> &Arc<Room> {
        &self.host.room
    }

    pub(crate) fn paths(&self) -> &Paths {
        &self.host.paths
    }

    pub(crate) async fn image_root(&self, image: &str) -> Result<Root> {
        Ok(self.images.find(image).await?.root)
    }

    pub(crate) fn start_timeout(&self) -> Duration {
        self.host.start_timeout
    }

    pub(crate) fn new_cid(&self) -> u32 {
        self.registry.new_cid()
    }

    /// Files whose contents determine a booted guest, except its image.
    pub(crate) fn golden_parts(&self, kernel: &Path) -> [PathBuf; 3] {
        let paths = &self.host.paths;
        [kernel.to_owned(), paths.initramfs(), paths.vmm()]
    }

    /// The key of VMs of this shape; computes digests if needed.
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
        operation::join_result(computed.await)?;
        Ok(self.known_key(shape, &kernel, &image.root))
    }

    /// The key of VMs of this shape; `None` while a digest it needs is not known yet. A later run
    /// may then use a golden snapshot.
    pub(super) fn known_key(&self, shape: &Spec, kernel: &Path, root: &Root) -> Option<String> {
        let parts = self.golden_parts(kernel);
        let digests = parts.iter().map(|path| self.digests.known(path));
        // A guest that booted on passt has no offloads, also where it is restored.
        let network = self.host.network.note().map(|_| Some("passt".to_owned()));
        let inputs: Option<Vec<String>> = digests.chain(network).collect();
        golden::key_of(shape, &root.contents_id(), &inputs?)
    }

    /// Was the image of this shape removed meanwhile?
    pub(crate) async fn golden_image_is_gone(&self, shape: &Spec) -> bool {
        self.images.find(&shape.image).await.is_err()
    }

    /// Is some VM starting, and not ready yet?
    pub(crate) fn is_starting(&self) -> bool {
        self.registry.any(is_starting_vm).is_some()
    }

    /// Waits until no VM is starting.
    pub(crate) async fn wait_until_none_starting(&self) {
        while let Some(vm) = self.registry.any(is_starting_vm) {
            vm.when(|view| view.vm.state != VmState::Starting).await;
        }
    }

    /// All features of this host's processor that a VM can have.
    ///
    /// # Errors
    ///
    /// If `jiffy-vmm` can't tell them, as without KVM.
    pub async fn processor(&self) -> Result<Profile> {
        let host = self.processor.host().await;
        host.map(|host| host.shown.clone()).map_err(|why| {
            Error::internal(format!(
                "The features of this host's processor can't be determined: {why}."
            ))
            .hint("`jiffy doctor` says what this host's KVM can do.")
        })
    }

    /// Information about the node.
    pub fn info(&self) -> NodeInfo {
        let mut all = self.registry.all();
        all.retain(|vm| !vm.spec.hidden);
        let running = all.iter().filter(|vm| vm.view.borrow().is_active()).count();
        NodeInfo {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            api: api::VERSION,
            pid: std::process::id(),
            clock: self.host.clock.clone(),
            now_ns: monotonic_ns(),
            data: self.host.paths.data.display().to_string(),
            running: running as u32,
            vms: all.len() as u32,
            standbys: self.goldens.standbys(),
            containment: Some(self.launcher().containment()),
        }
    }

    /// As [`Node::started`], and until the guest has reported whether the first command was started.
    ///
    /// # Errors
    ///
    /// As in [`Node::started`].
    pub async fn command_started(&self, vm: &VmHandle) -> Result<Vm> {
        if vm.spec.command.is_some() {
            vm.when(|view| view.vm.state != VmState::Starting).await;
            let reported = vm
                .when(|view| view.main != MainState::Pending || view.vm.state != VmState::Running);
            let _ = tokio::time::timeout(REPORT_TIME, reported).await;
        }
        self.started(vm).await
    }

    /// Waits until a VM that was started is ready or has ended, and its record is saved.
    ///
    /// # Errors
    ///
    /// If it ended abnormally, its first command can't be started, or the record can't be saved.
    pub async fn started(&self, vm: &VmHandle) -> Result<Vm> {
        let view = vm
            .when(|view| {
                use VmState::{Exited, Hibernated, Paused, Running};
                matches!(view.vm.state, Running | Paused | Exited | Hibernated)
            })
            .await;
        match (&view.failure, &view.main) {
            (Some(failure), _) if !view.is_active() => {
                let mut error = Error::vm_failed(failure.message.clone());
                error.0.hint = failure.hint.clone();
                Err(error)
            }
            (_, MainState::Ended(MainEnd::Failed(failed))) => {
                let mut error = Error::vm_failed(failed.message.clone());
                error.0.exit_code = u8::try_from(failed.kind.exit_code()).ok();
                Err(error)
            }
            _ => {
                let mut shown = view.vm;
                if limits::is_resized(vm) {
                    // Until it has what its record says.
                    drop(vm.operate().await);
                    shown = vm.vm();
                }
                if !view.removed && !vm.spec.remove {
                    vm.ask(Command::Save).await??;
                }
                Ok(shown)
            }
        }
    }

    /// Waits a little for VMs that satisfy `holds` and are being removed: the last command's VM
    /// may still be powering off.
    async fn wait_for_removal(&self, holds: impl Fn(&VmHandle) -> bool) {
        let deadline = tokio::time::Instant::now() + NAME_TIME;
        while let Some(vm) = self
            .registry
            .any(|vm| holds(vm) && vm.view.borrow().leaving)
        {
            // A removed VM is no longer in the registry when its view says so.
            let settled = vm.when(|view| !view.leaving || view.removed);
            match tokio::time::timeout_at(deadline, settled).await {
                Ok(view) if view.removed || !view.leaving => {}
                // Too late, or its task ended with the daemon.
                _ => return,
            }
        }
    }

    /// A VM's folder.
    pub fn folder(&self, vm: &VmHandle) -> PathBuf {
        self.host.paths.vm(&vm.id)
    }

    /// As [`Node::agent_socket`]; wakes a VM that is hibernated or hibernating.
    ///
    /// # Errors
    ///
    /// If the VM can't be woken, or as in [`Node::agent_socket`].
    pub async fn awake_socket(self: &Arc<Self>, vm: &Arc<VmHandle>) -> Result<PathBuf> {
        self.wake_if_asleep(vm).await?;
        self.agent_socket(vm).await
    }

    /// A VM's vsock socket, once its agent is ready.
    ///
    /// # Errors
    ///
    /// If the VM is paused, stopping, hibernated or not running.
    pub async fn agent_socket(&self, vm: &VmHandle) -> Result<PathBuf> {
        self.agent_ready(vm).await?;
        Ok(self.host.paths.vsock_socket(&vm.id))
    }

    /// Waits until a VM's agent is ready.
    async fn agent_ready(&self, vm: &VmHandle) -> Result<()> {
        // `when` copies the view.
        if vm.view.borrow().vm.state == VmState::Running {
            return Ok(());
        }
        let view = vm.when(|view| view.vm.state != VmState::Starting).await;
        if view.vm.state == VmState::Running {
            return Ok(());
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
            VmState::Paused => is_paused(vm),
            _ => Error::wrong_state(format!("The VM {name} does not run."))
                .hint(format!("Start it with `jiffy start {name}`.")),
        })
    }
}

/// The error of an operation that a paused VM refuses.
fn is_paused(vm: &VmHandle) -> Error {
    let name = &vm.name;
    Error::wrong_state(format!("The VM {name} is paused."))
        .hint(format!("Resume it with `jiffy resume {name}`."))
}

fn is_starting_vm(vm: &VmHandle) -> bool {
    // The view of a VM whose task has failed does not change any more.
    vm.view.borrow().vm.state == VmState::Starting && vm.view.has_changed().is_ok()
}
