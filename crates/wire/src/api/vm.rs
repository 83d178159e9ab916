//! VMs: requests to create them, how answers describe them, and operations on them.

use super::{
    FolderUse, IdlePolicy, NetworkUse, Priority, Queued, RootDisk, VmIdle, VmNetwork, VolumeUse,
};
use crate::agent::{Command, ExitStatus, Stream};
use crate::vmm::{DiskLimit, NetLimit};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Body of `POST /v1/vms`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CreateVm {
    /// Name of the VM; `None` generates one.
    #[serde(default)]
    pub name: Option<String>,
    /// Image: a name, or a reference like `HOST/REPO:TAG`; `None` means `base`.
    #[serde(default)]
    pub image: Option<String>,
    /// Registry of references without one.
    #[serde(default)]
    pub registry: Option<String>,
    /// Name of the kernel; `None` means `base`.
    #[serde(default)]
    pub kernel: Option<String>,
    /// Number of vCPUs; `None` means 1.
    #[serde(default)]
    pub cpus: Option<u8>,
    /// The most vCPUs that it may have while it runs; `None`: `cpus`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_cpus: Option<u8>,
    /// RAM in MiB; `None` means 128.
    #[serde(default)]
    pub memory_mib: Option<u32>,
    /// The most RAM that it may have while it runs, MiB; `None`: `memory_mib`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_memory_mib: Option<u32>,
    /// Size of the host pages that back RAM.
    #[serde(default)]
    pub pages: crate::vmm::PageSize,
    /// Volumes, beginning with `/dev/vdb`.
    #[serde(default)]
    pub disks: Vec<VolumeUse>,
    /// Folders of the node's host, as mounts in the guest. A VM can be captured if each says so.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub folders: Vec<FolderUse>,
    /// Disk for changes of the root file system; `None` keeps them in the guest's memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root_disk: Option<RootDisk>,
    /// Limit on each disk of the root file system.
    #[serde(default, skip_serializing_if = "DiskLimit::is_none")]
    pub root_limit: DiskLimit,
    /// The first command; `None` starts nothing, and the VM waits for `exec`. Its argv follows the
    /// image's entrypoint; an empty argv means the image's command.
    #[serde(default)]
    pub command: Option<Command>,
    /// Replaces the image's entrypoint and its arguments.
    #[serde(default)]
    pub entrypoint: Option<Vec<String>>,
    /// Behaviour if neither the request nor the image has a command.
    #[serde(default)]
    pub no_command: NoCommand,
    /// Execute this program with its arguments (`/sbin/init`) as PID 1.
    #[serde(default)]
    pub init: Option<Vec<String>>,
    /// A serial console, which `jiffy logs --console` shows.
    #[serde(default)]
    pub console: bool,
    /// Remove the VM when it has ended.
    #[serde(default)]
    pub remove: bool,
    /// Host name in the guest; `None` means the VM's name.
    #[serde(default)]
    pub hostname: Option<String>,
    /// Further kernel parameters.
    #[serde(default)]
    pub kernel_args: Option<String>,
    /// The part of the host's processor that the VM sees; `None` means all. With a profile the VM
    /// boots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_profile: Option<crate::cpu::Wanted>,
    /// Report the kernel's milestones on the timeline.
    #[serde(default)]
    pub timeline: bool,
    /// Record on the timeline what the VMM's threads do, and the exits.
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    pub deep: bool,
    /// Restore this snapshot instead of booting. It determines the VM's configuration; a command
    /// replaces the captured one.
    #[serde(default)]
    pub from: Option<String>,
    /// Boot even if there is a golden snapshot.
    #[serde(default)]
    pub cold: bool,
    /// Its network; by default the network `default`, if the node can have one.
    #[serde(default, skip_serializing_if = "NetworkUse::is_default")]
    pub network: NetworkUse,
    /// What happens when nobody uses it; `None`: nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle: Option<IdlePolicy>,
    /// Who owns it: requests of different owners take turns in the queue. `None`: whoever sends the
    /// request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Its priority in the queue.
    #[serde(default, skip_serializing_if = "Priority::is_normal")]
    pub priority: Priority,
}

/// Meaning of an empty first command if the image has none either.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NoCommand {
    /// The request is refused.
    #[default]
    Refuse,
    /// A shell, `/bin/sh`.
    Shell,
    /// No first command: the VM waits for `exec`.
    Wait,
}

/// Body of `POST /v1/run`, which creates and starts a VM and attaches to it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunVm {
    /// The VM.
    pub vm: CreateVm,
    /// Answer with [`Vm`] (200) once it is started, instead of attaching.
    #[serde(default)]
    pub detach: bool,
    /// How long it may wait for memory and vCPUs, seconds; `None`: as long as the node allows by
    /// default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_s: Option<u32>,
}

/// State of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VmState {
    /// Created and not started, or stopped; it can be started.
    Created,
    /// The VMM runs; the agent is not ready.
    Starting,
    /// The agent is ready.
    Running,
    /// Its vCPUs are stopped by request.
    Paused,
    /// It is being stopped.
    Stopping,
    /// Its memory is on disk. It has no VMM until it is woken.
    Hibernated,
    /// It has ended.
    Exited,
}

/// A VM in answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vm {
    /// 12 hexadecimal digits.
    pub id: String,
    /// Its name.
    pub name: String,
    /// Its state.
    pub state: VmState,
    /// Image name.
    pub image: String,
    /// Kernel name.
    pub kernel: String,
    /// vCPUs that its programs may use.
    pub cpus: u8,
    /// The most vCPUs that it may have, if that is more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_cpus: Option<u8>,
    /// RAM that its programs may use, MiB.
    pub memory_mib: u32,
    /// The most RAM that it may have, MiB, if that is more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_memory_mib: Option<u32>,
    /// The first command's argv, if any.
    pub command: Option<Vec<String>>,
    /// The first command runs on a pseudo-terminal, so `attach` sets its terminal to raw mode.
    #[serde(default)]
    pub tty: bool,
    /// Volumes.
    pub disks: Vec<VolumeUse>,
    /// Folders of the node's host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub folders: Vec<FolderUse>,
    /// Disk for the changes of its root file system.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root_disk: Option<RootDisk>,
    /// Ports that its image exposes, such as `80/tcp`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exposed_ports: Vec<String>,
    /// Labels of its image.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Unix time of creation, seconds.
    pub created: u64,
    /// Unix time of the last start, seconds.
    pub started: Option<u64>,
    /// Unix time of the last end, seconds.
    pub ended: Option<u64>,
    /// Process id of its VMM while it runs.
    pub pid: Option<u32>,
    /// vsock context id.
    pub cid: u32,
    /// Exit status of the first command.
    pub exit: Option<ExitStatus>,
    /// Why the VM ended, as one sentence, unless it ended normally; or what is wrong with a running
    /// or hibernated one.
    pub error: Option<String>,
    /// Remove it when it has ended.
    pub remove: bool,
    /// Warnings of the guest's init.
    #[serde(default)]
    pub warnings: Vec<String>,
    /// Origin of its memory, if it did not boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<Origin>,
    /// Its network, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<VmNetwork>,
    /// Its activity, if something happens to it when it is idle.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle: Option<VmIdle>,
    /// Its owner, if one was chosen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Its priority in the queue.
    #[serde(default, skip_serializing_if = "Priority::is_normal")]
    pub priority: Priority,
    /// Its request that waits for memory or vCPUs; only in `inspect`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queued: Option<Queued>,
    /// Rate limits of its root file system and its network; those of volumes are in `disks`.
    #[serde(default, skip_serializing_if = "Limits::is_default")]
    pub limits: Limits,
}

/// Origin of the memory of a VM that did not boot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// The snapshot of this name.
    From(String),
    /// A fork of the running VM of this name.
    ForkedFrom(String),
    /// A golden snapshot; for the user this is like a boot.
    Golden,
}

/// Body of `POST /v1/vms/{vm}/fork`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ForkVm {
    /// Number of children; `None` means 1.
    #[serde(default)]
    pub count: Option<u32>,
    /// Name of the child; several are named `NAME-1`, `NAME-2`, … `None` generates names.
    #[serde(default)]
    pub name: Option<String>,
    /// Priority of this request in the queue; `None`: the parent's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<Priority>,
    /// How long it may wait for memory and vCPUs, seconds; `None`: as long as the node allows by
    /// default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_s: Option<u32>,
}

/// Result of a fork.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Forked {
    /// The children; all are ready.
    pub vms: Vec<Vm>,
    /// Pause of the parent's vCPUs, nanoseconds.
    pub pause_ns: u64,
    /// Timeline of the parent's side.
    pub timeline: crate::timeline::Timeline,
}

/// Rate limits of a VM's disks and network interface, its vCPUs and its memory. As the body of
/// `POST /v1/vms/{vm}/limits` those that change: what is absent stays as it is, and an empty limit
/// removes one.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Of each disk of the root file system.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root: Option<DiskLimit>,
    /// Of volumes, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub volumes: BTreeMap<String, DiskLimit>,
    /// Of the network interface, in each direction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetLimit>,
    /// vCPUs that its programs may use. Absent in answers, where [`Vm::cpus`] says it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<u8>,
    /// RAM that its programs may use, MiB. Absent in answers, where [`Vm::memory_mib`] says it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u32>,
}

impl Limits {
    /// Whether it has none.
    pub fn is_default(&self) -> bool {
        *self == Limits::default()
    }

    /// Takes over the changes of `newer`.
    pub fn change(&mut self, newer: Limits) {
        self.root = newer.root.or(self.root);
        self.volumes.extend(newer.volumes);
        self.network = newer.network.or(self.network);
        self.cpus = newer.cpus.or(self.cpus);
        self.memory_mib = newer.memory_mib.or(self.memory_mib);
    }
}

/// Result of a hibernation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hibernated {
    /// The VM.
    pub vm: Vm,
    /// Bytes of its memory and state on disk.
    pub bytes: u64,
    /// Timeline of the hibernation.
    pub timeline: crate::timeline::Timeline,
}

/// A piece of a log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogChunk {
    /// The stream; console and VMM logs are stdout.
    pub stream: Stream,
    /// The bytes.
    #[serde(with = "serde_bytes")]
    pub data: Vec<u8>,
}
