//! A VM: what it is made of, and all that is known of it.

use super::image::LazyDisk;
use crate::clock::unix_seconds;
use crate::durable::LoadError;
use jiffy_sys::causes;
use jiffy_wire::agent::{Command, ExitStatus, StartError};
use jiffy_wire::api::{
    FolderUse, IdlePolicy, ImageConfig, Limits, NetworkPolicy, NetworkUse, Origin, Priority,
    RootDisk, Vm, VmNetwork, VmState, VolumeUse,
};
use jiffy_wire::cpu::Wanted;
use jiffy_wire::vmm::{DiskLimit, NetLimit, PageSize};
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

/// Most warnings of a guest that are kept.
pub const MAX_WARNINGS: usize = 100;

/// Whether a VM in this state has a VMM.
pub fn is_active(state: VmState) -> bool {
    matches!(
        state,
        VmState::Starting | VmState::Running | VmState::Paused | VmState::Stopping
    )
}

/// What a VM is made of; fixed when it is created.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Spec {
    /// Image by name.
    pub image: String,
    /// The image's configuration: how its commands are started.
    pub config: ImageConfig,
    /// Kernel by name.
    pub kernel: String,
    /// vCPUs that are online when it has booted.
    pub cpus: u8,
    /// vCPUs of its VMM, if that is more.
    pub max_cpus: Option<u8>,
    /// RAM that programs may use when it has booted.
    pub memory_mib: u32,
    /// RAM of its VMM, if `jiffy update` may change what programs may use.
    pub max_memory_mib: Option<u32>,
    /// Host pages that back RAM.
    pub pages: PageSize,
    /// Volumes, `/dev/vdb` first.
    pub disks: Vec<VolumeUse>,
    /// The first command.
    pub command: Option<Command>,
    /// The distribution's own init.
    pub init: Option<Vec<String>>,
    /// Whether it has a serial console.
    pub console: bool,
    /// Whether the VM is removed when it has ended.
    pub remove: bool,
    /// Host name, if not the VM's name.
    pub hostname: Option<String>,
    /// Further kernel parameters.
    pub kernel_args: Option<String>,
    /// The features of the host's processor that it may use; `None` for all.
    pub cpu_profile: Option<Wanted>,
    /// Whether the kernel's milestones are reported.
    pub timeline: bool,
    /// Whether the activity of its VMM's threads is recorded.
    pub deep: bool,
    /// The snapshot it is restored from at each start.
    pub from: Option<FromSnapshot>,
    /// Never start from a golden snapshot.
    pub cold: bool,
    /// An internal VM, made only to be captured; it is not shown to users.
    pub hidden: bool,
    /// Programs to read into the page cache before it is captured.
    pub preload: Vec<String>,
    /// Its own disk for changes to its root file system.
    pub root_disk: Option<RootDisk>,
    /// Rate limit of each disk of its root.
    pub root_limit: DiskLimit,
    /// Its volumes are clones in its folder.
    pub own_volumes: bool,
    /// Folders of the host.
    pub folders: Vec<FolderUse>,
    /// Its network interface, if it has one.
    pub network: Option<NetworkUse>,
    /// What happens when it is idle.
    pub idle: Option<IdlePolicy>,
    /// Its owner, if one was chosen.
    pub owner: Option<String>,
    /// Priority of its requests in the queue.
    pub priority: Priority,
}

impl Spec {
    /// vCPUs of its VMM.
    pub fn vcpus(&self) -> u8 {
        self.max_cpus.unwrap_or(self.cpus).max(self.cpus)
    }

    /// vCPUs of its VMM, if these are more than `cpus`.
    pub fn vcpus_beyond(&self, cpus: u8) -> Option<u8> {
        Some(self.vcpus()).filter(|vcpus| *vcpus > cpus)
    }

    /// RAM of its VMM.
    pub fn ram_mib(&self) -> u32 {
        self.max_memory_mib.unwrap_or(self.memory_mib)
    }

    /// The memory, MiB, and the vCPUs that a VM with these numbers of them needs until it is ready:
    /// one that is restored from its snapshot begins with what was captured.
    pub fn until_ready(&self, memory_mib: u32, cpus: u8) -> (u32, u8) {
        match self.from {
            Some(_) => (memory_mib.max(self.memory_mib), cpus.max(self.cpus)),
            None => (memory_mib, cpus),
        }
    }
}

/// A snapshot to restore.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FromSnapshot {
    /// Its name.
    pub name: String,
    /// The first command is a new one, not the one that was captured.
    pub start_main: bool,
}

/// The image a VM's root file system was last started from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Root {
    /// The image's file.
    pub path: PathBuf,
    /// BLAKE3 of its contents, hexadecimal.
    pub digest: String,
    /// Set if it is a lazy disk, filled as guests read it.
    pub lazy: Option<LazyDisk>,
}

impl Root {
    /// An id of the root's contents. The digest of a lazy root was not computed here but claimed
    /// by the registry, so the id of its chunks, by which it is read, is used instead.
    pub fn contents_id(&self) -> String {
        match &self.lazy {
            None => self.digest.clone(),
            Some(disk) => format!(
                "chunks {} {}",
                disk.chunks.first().map_or("", String::as_str),
                if disk.ext4 { "ext4" } else { "erofs" }
            ),
        }
    }
}

/// Memory that the pager serves to a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Paged {
    /// The image of RAM.
    pub image: PathBuf,
    /// Where the chunks it touches are recorded, if they are.
    pub record: Option<PathBuf>,
    /// Fetch the image's working set in advance.
    pub prefetch: bool,
}

/// State of the first command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MainState {
    /// It has not been started yet (or there is none).
    Pending,
    /// It runs.
    Started,
    /// It is over.
    Ended(MainEnd),
}

/// How the first command ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MainEnd {
    /// By itself or by a signal.
    Exited(ExitStatus),
    /// It could not be started.
    Failed(StartError),
    /// The VM ended first.
    Lost(Failure),
}

/// Why a VM ended abnormally.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Failure {
    /// One sentence.
    pub message: String,
    /// What the user can do.
    pub hint: Option<String>,
}

/// All that is known of a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmRecord {
    /// 12 hexadecimal digits.
    pub id: String,
    /// Unique on the node.
    pub name: String,
    /// What it is made of. Shared, because a node may have thousands of hibernated VMs.
    pub spec: Arc<Spec>,
    /// vsock context id, unique on the node.
    pub cid: u32,
    /// Unix time.
    pub created: u64,
    /// State of its life cycle.
    pub state: VmState,
    /// Unix time of the last start.
    pub started: Option<u64>,
    /// Unix time of the last end.
    pub ended: Option<u64>,
    /// The VMM's process id.
    pub pid: Option<u32>,
    /// State of the first command.
    pub main: MainState,
    /// Its process id in the guest, once it was started.
    pub main_pid: Option<u32>,
    /// Why the VM ended, if abnormally.
    pub failure: Option<Failure>,
    /// Warnings of the guest's init.
    pub warnings: Vec<String>,
    /// Offset in the log, bytes, of what the last start wrote.
    pub log_start: u64,
    /// Where its memory came from at the last start, if it did not boot.
    pub origin: Option<Origin>,
    /// Its root file system, as of the last start.
    pub root: Option<Root>,
    /// The memory that the pager serves to it, if its RAM is not mapped.
    pub paged: Option<Paged>,
    /// Its addresses, IPv4 first, from its start to its end.
    pub addresses: Vec<IpAddr>,
    /// Its network policy, if that was changed after it was made.
    pub policy: Option<NetworkPolicy>,
    /// Limits that were changed after it was made.
    pub limits: Limits,
}

/// What is kept of a VM for the next daemon: its record, and the part of its task's phase that nobody
/// else can report again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kept {
    /// Its record.
    pub record: VmRecord,
    /// Its guest has reported that its programs have ended; it is writing its disks back.
    pub powering_off: bool,
}

impl From<VmRecord> for Kept {
    /// Of a VM whose guest does not power off.
    fn from(record: VmRecord) -> Kept {
        Kept {
            record,
            powering_off: false,
        }
    }
}

impl VmRecord {
    /// A VM that was just made.
    pub fn new(id: String, name: String, spec: impl Into<Arc<Spec>>, cid: u32) -> VmRecord {
        VmRecord {
            id,
            name,
            spec: spec.into(),
            cid,
            created: unix_seconds(),
            state: VmState::Created,
            started: None,
            ended: None,
            pid: None,
            main: MainState::Pending,
            main_pid: None,
            failure: None,
            warnings: Vec::new(),
            log_start: 0,
            origin: None,
            root: None,
            paged: None,
            addresses: Vec::new(),
            policy: None,
            limits: Limits::default(),
        }
    }

    /// Its current network policy.
    pub fn network_policy(&self) -> NetworkPolicy {
        let made_with = || self.spec.network.as_ref().map(|it| it.policy.clone());
        self.policy.clone().or_else(made_with).unwrap_or_default()
    }

    /// Current rate limit of each disk of its root.
    fn root_limit(&self) -> DiskLimit {
        self.limits.root.unwrap_or(self.spec.root_limit)
    }

    /// Its volumes, with their current rate limits.
    fn volumes(&self) -> Vec<VolumeUse> {
        let mut volumes = self.spec.disks.clone();
        for volume in &mut volumes {
            if let Some(changed) = self.limits.volumes.get(&volume.name) {
                volume.limit = *changed;
            }
        }
        volumes
    }

    /// Current rate limits of its disks, in the order of [`crate::roots::disks`].
    pub fn disk_limits(&self) -> Vec<DiskLimit> {
        let root = self.root_limit();
        let layer = matches!(self.spec.root_disk, Some(RootDisk::Layer { .. }));
        let volumes = self.volumes();
        let volumes = volumes.iter().map(|volume| volume.limit);
        [root]
            .into_iter()
            .chain(volumes)
            .chain(layer.then_some(root))
            .collect()
    }

    /// vCPUs that its programs may use now.
    pub fn cpus(&self) -> u8 {
        self.limits.cpus.unwrap_or(self.spec.cpus)
    }

    /// RAM that its programs may use now.
    pub fn memory_mib(&self) -> u32 {
        self.limits.memory_mib.unwrap_or(self.spec.memory_mib)
    }

    /// Current rate limit of its network interface, if it has one.
    pub fn network_limit(&self) -> Option<NetLimit> {
        let network = self.spec.network.as_ref()?;
        Some(self.limits.network.unwrap_or(network.limit))
    }

    /// As the API shows it.
    pub fn view(&self) -> Vm {
        let spec = &self.spec;
        let (exit, start_error) = match &self.main {
            MainState::Ended(MainEnd::Exited(status)) => (Some(*status), None),
            MainState::Ended(MainEnd::Failed(error)) => (
                Some(ExitStatus::Code(error.kind.exit_code())),
                Some(error.message.clone()),
            ),
            _ => (None, None),
        };
        Vm {
            id: self.id.clone(),
            name: self.name.clone(),
            state: self.state,
            image: spec.image.clone(),
            kernel: spec.kernel.clone(),
            cpus: self.cpus(),
            max_cpus: spec.vcpus_beyond(self.cpus()),
            memory_mib: self.memory_mib(),
            max_memory_mib: Some(spec.ram_mib()).filter(|most| *most > self.memory_mib()),
            command: spec.command.as_ref().map(|command| command.argv.clone()),
            tty: spec
                .command
                .as_ref()
                .is_some_and(|command| command.tty.is_some()),
            disks: self.volumes(),
            folders: self.spec.folders.clone(),
            root_disk: spec.root_disk.clone(),
            exposed_ports: spec.config.exposed_ports.clone(),
            labels: spec.config.labels.clone(),
            created: self.created,
            started: self.started,
            ended: self.ended,
            pid: self.pid,
            cid: self.cid,
            exit,
            error: self
                .failure
                .as_ref()
                .map(|failure| failure.message.clone())
                .or(start_error),
            remove: spec.remove,
            warnings: self.warnings.clone(),
            origin: self.origin.clone(),
            network: spec.network.as_ref().map(|network| VmNetwork {
                name: network.name.clone().unwrap_or_default(),
                addresses: self.addresses.iter().map(IpAddr::to_string).collect(),
                ports: network.ports.clone(),
                policy: self.network_policy(),
                proxy_ports: network.proxy_ports.clone(),
                ..VmNetwork::default()
            }),
            idle: spec.idle.map(Into::into),
            owner: spec.owner.clone(),
            priority: spec.priority,
            queued: None,
            limits: Limits {
                root: Some(self.root_limit()).filter(|limit| !limit.is_none()),
                volumes: BTreeMap::new(),
                network: self.network_limit().filter(|limit| !limit.is_none()),
                cpus: None,
                memory_mib: None,
            },
        }
    }

    /// A record to show in place of one that can't be read.
    pub fn unreadable(id: &str, name: &str, error: &LoadError) -> VmRecord {
        let why = causes::sentence(error);
        let failure = match error.is_newer() {
            true => Failure {
                message: format!(
                    "The record of the VM {name} was written by a newer release of Jiffy, and the VM is left as it is: {why}."
                ),
                hint: Some(format!(
                    "Go back to that release, or remove the VM with `jiffy rm --force {name}`."
                )),
            },
            false => Failure {
                message: format!(
                    "The record of the VM {name} can't be read, and the VM is left as it is: {why}."
                ),
                hint: Some(format!("Remove it with `jiffy rm --force {name}`.")),
            },
        };
        VmRecord {
            created: 0,
            state: VmState::Exited,
            failure: Some(failure),
            ..VmRecord::new(id.to_owned(), name.to_owned(), Spec::default(), 0)
        }
    }
}
