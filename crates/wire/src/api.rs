//! The node's HTTP/1.1 API, JSON over a Unix socket (local) or TCP with a
//! bearer token (the machine).
//!
//! | method and path | body | answer |
//! |---|---|---|
//! | `GET /v1/info` | | [`NodeInfo`] |
//! | `POST /v1/vms` | [`CreateVm`] | [`Vm`] (created, not started) |
//! | `POST /v1/run` | [`RunVm`] | 101, then [`crate::agent::ExecInput`] and [`crate::agent::ExecOutput`] frames; header [`VM_ID_HEADER`] |
//! | `GET /v1/vms?all=true` | | `[Vm]` |
//! | `GET /v1/vms/{vm}` | | [`Vm`] (`inspect`) |
//! | `POST /v1/vms/{vm}/start?priority=P&wait_s=N` | | [`Vm`] |
//! | `POST /v1/vms/{vm}/stop?grace_ms=N` | | [`Vm`] |
//! | `POST /v1/vms/{vm}/kill?signal=N` | | [`Vm`]: without a signal the VM ends at once, with one its first command gets it |
//! | `POST /v1/vms/{vm}/wait` | | [`Vm`] once it has ended |
//! | `DELETE /v1/vms/{vm}?force=true` | | 204 |
//! | `POST /v1/vms/{vm}/exec` | [`crate::agent::Command`] | 101, then frames as above |
//! | `POST /v1/vms/{vm}/attach` | | 101, then frames as above, for the first command |
//! | `GET /v1/vms/{vm}/logs?follow=true&tail=N&source=command\|console\|vmm` | | a stream of frames [`LogChunk`] |
//! | `POST /v1/vms/{vm}/copy-in?path=P` | | 101, then [`crate::agent::CopyFrame`]s in, one [`crate::agent::CopyDone`] out |
//! | `POST /v1/vms/{vm}/copy-out?path=P` | | 101, then [`crate::agent::CopyFrame`]s out |
//! | `GET /v1/vms/{vm}/stat` | | [`crate::agent::Stat`] |
//! | `GET /v1/vms/{vm}/timeline` | | [`crate::timeline::Timeline`] |
//! | `POST /v1/vms/{vm}/pause` | | [`Vm`], its vCPUs stopped |
//! | `POST /v1/vms/{vm}/resume` | | [`Vm`], its vCPUs running |
//! | `POST /v1/vms/{vm}/fork` | [`ForkVm`] | [`Forked`], all children ready |
//! | `POST /v1/vms/{vm}/hibernate` | | [`Hibernated`] |
//! | `POST /v1/vms/{vm}/wake?priority=P&wait_s=N` | | [`Vm`], ready |
//! | `GET /v1/queue` | | `[Queued]`, in the order in which they will be served |
//! | `GET /v1/queue/{request}` | | a stream of lines [`Queued`], JSON: one for each place that it has, until it waits no more |
//! | `POST /v1/vms/{vm}/snapshots` | [`MakeSnapshot`] | [`SnapshotMade`] |
//! | `GET /v1/snapshots?all=true` | | `[Snapshot]`; golden ones with `all` |
//! | `GET /v1/snapshots/{name}` | | [`Snapshot`] |
//! | `DELETE /v1/snapshots/{name}` | | 204 |
//! | `GET /v1/snapshots/{name}/memory?map=true` | | [`MemoryReport`], with its ranges if `map` is true |
//! | `GET /v1/snapshots/{name}/picture` | | a PNG of the address space |
//! | `POST /v1/snapshots/{name}/optimise` | | [`Snapshot`] |
//! | `POST /v1/snapshots/prune` | | [`Pruned`]: golden snapshots are removed |
//! | `GET /v1/images` | | `[Image]` |
//! | `POST /v1/images/{name}?kind=root\|layout\|docker&from=TEXT` | a tar stream; without a kind its first entry decides | [`Image`] |
//! | `GET /v1/images/{name}?registry=HOST` | | [`Image`] |
//! | `DELETE /v1/images/{name}` | | 204 |
//! | `POST /v1/prune/images` | | [`Pruned`]: images of references that no VM needs |
//! | `POST /v1/pulls` | [`PullImage`] | a stream of lines [`PullStep`], JSON |
//! | `POST /v1/pushes` | [`PushArtifact`] | a stream of lines [`PullStep`], JSON |
//! | `POST /v1/vms/{vm}/commit` | [`CommitVm`] | [`Committed`] |
//! | `POST /v1/vms/{vm}/policy` | [`NetworkPolicy`] | [`Vm`] with its new policy |
//! | `GET /v1/networks` | | `[Network]` |
//! | `GET /v1/networks/{name}` | | [`Network`] |
//! | `POST /v1/networks/{name}` | | [`Network`], created |
//! | `DELETE /v1/networks/{name}` | | 204 |
//! | `GET /v1/kernels` | | `[KernelInfo]` |
//! | `PUT /v1/kernels/{name}` | a kernel image | [`KernelInfo`] |
//! | `GET /v1/volumes` | | `[Volume]` |
//! | `POST /v1/volumes/{name}` | [`MakeVolume`] | [`Volume`] |
//! | `POST /v1/volumes/{name}/resize` | [`ResizeVolume`] | [`ResizedVolume`] |
//! | `DELETE /v1/volumes/{name}` | | 204 |
//! | `POST /v1/vms/{vm}/disks/{name}`, `DELETE …` | | refused: no hot-plug |
//! | `GET /v1/requests/{id}` | | [`RequestState`] |
//! | `POST /v1/shutdown` | | 204; the daemon ends, VMs keep running |
//!
//! A request with the header [`REQUEST_HEADER`] can be asked for by its id, at the next daemon, too.
//!
//! `{vm}` is an id, a unique prefix of one, or a name. Upgrades send `Connection: upgrade` and
//! `Upgrade: jiffy-frames`. Errors are [`ApiError`].

use crate::agent::{Command, ExitStatus, Stream};
use crate::vmm::{DiskLimit, NetLimit};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Version of this API, part of every path.
pub const VERSION: u32 = 1;
/// Protocol name in `Upgrade:`.
pub const UPGRADE: &str = "jiffy-frames";
/// Header in which `/v1/run` returns the id of its VM.
pub const VM_ID_HEADER: &str = "jiffy-vm-id";
/// Header with an id that the client gives a request, 32 hexadecimal digits in lower case: by it the
/// request's place in the queue is followed, and whether it was begun can be asked later.
pub const REQUEST_HEADER: &str = "jiffy-request";

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
    /// Size of the host pages that back RAM.
    #[serde(default)]
    pub pages: crate::vmm::PageSize,
    /// Volumes, beginning with `/dev/vdb`.
    #[serde(default)]
    pub disks: Vec<VolumeUse>,
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

/// Priority of a request that waits for memory or vCPUs.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Priority {
    /// Served after requests of the other priorities.
    Low,
    /// Of requests without another priority.
    #[default]
    Normal,
    /// Served first; after eight of these, one of another priority that waits has its turn.
    High,
}

impl Priority {
    /// Whether this is the default.
    pub fn is_normal(&self) -> bool {
        *self == Priority::Normal
    }

    /// Its name in requests and answers.
    pub fn name(self) -> &'static str {
        match self {
            Priority::Low => "low",
            Priority::Normal => "normal",
            Priority::High => "high",
        }
    }
}

/// What a request does when it has memory and vCPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Purpose {
    /// It boots a VM or restores it from a snapshot.
    Start,
    /// It wakes a hibernated VM.
    Wake,
    /// It forks a running VM.
    Fork,
}

impl Purpose {
    /// Its name in answers.
    pub fn name(self) -> &'static str {
        match self {
            Purpose::Start => "start",
            Purpose::Wake => "wake",
            Purpose::Fork => "fork",
        }
    }
}

/// A request that waits for memory or vCPUs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Queued {
    /// Its place in the order in which requests will be served, from 1. A request of a higher
    /// priority that arrives later is served before it.
    pub place: u32,
    /// Id of its VM; of a fork, the parent's.
    pub id: String,
    /// Name of that VM.
    pub name: String,
    /// What it waits for.
    pub purpose: Purpose,
    /// Whose request it is.
    pub owner: String,
    /// Its priority, as requested.
    pub priority: Priority,
    /// Number of VMs that it starts: the children of a fork.
    pub vms: u32,
    /// Memory that it needs for all of them, MiB.
    pub memory_mib: u64,
    /// vCPUs that it needs for all of them.
    pub cpus: u64,
    /// Unix time of its arrival, seconds.
    pub since: u64,
    /// Unix time at which it is refused, seconds.
    pub until: u64,
}

/// What happens to a VM that is idle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IdlePolicy {
    /// How long it is idle before that, seconds.
    pub after_s: u32,
    /// What is done then.
    #[serde(default)]
    pub action: IdleAction,
}

/// What is done with a VM that is idle.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IdleAction {
    /// It is hibernated, and woken by the next use.
    #[default]
    Hibernate,
    /// It is stopped.
    Stop,
}

/// What the node knows of a VM's activity.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmIdle {
    /// How long it is idle before something is done, seconds.
    pub after_s: u32,
    /// What is done then.
    pub action: IdleAction,
    /// Seconds since it was last active, while it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_s: Option<u64>,
    /// What keeps it awake, each in words, such as `1 exec` or `CPU 12.0 %`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub awake: Vec<String>,
    /// Why it could not be hibernated or stopped when it was idle; one sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl From<IdlePolicy> for VmIdle {
    fn from(policy: IdlePolicy) -> VmIdle {
        VmIdle {
            after_s: policy.after_s,
            action: policy.action,
            idle_s: None,
            awake: Vec::new(),
            error: None,
        }
    }
}

/// Network of a VM, and its policy.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkUse {
    /// `none`, `default`, or a user-defined network; VMs of a user-defined network reach each
    /// other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Published ports: `[ADDRESS:]HOST[-HOST]:GUEST[-GUEST][/udp]`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<String>,
    /// Publish all ports that its image exposes, each at a free port of the host.
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    pub publish_all: bool,
    /// What it may reach.
    #[serde(default, skip_serializing_if = "NetworkPolicy::is_default")]
    pub policy: NetworkPolicy,
    /// Name servers instead of the node's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dns: Vec<String>,
    /// Search domains, tried before the node's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub search: Vec<String>,
    /// Further lines of its /etc/hosts: `NAME:ADDRESS`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<String>,
    /// TCP ports that the node's proxy may reach, each `PORT` or `FROM-TO`; `None`: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proxy_ports: Option<Vec<String>>,
    /// Rate limit in each direction.
    #[serde(default, skip_serializing_if = "NetLimit::is_none")]
    pub limit: NetLimit,
}

impl NetworkUse {
    /// Whether everything has its default.
    pub fn is_default(&self) -> bool {
        *self == NetworkUse::default()
    }
}

/// Changes to what all VMs may reach: `TARGET[:PORT[-PORT]][/tcp|/udp]`, where TARGET is `all`,
/// `host`, an address, a range, a name or `*.NAME`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkPolicy {
    /// Reachable, whatever the other rules say.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allow: Vec<String>,
    /// Not reachable, unless allowed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub deny: Vec<String>,
}

impl NetworkPolicy {
    /// Whether the rules of all VMs apply unchanged.
    pub fn is_default(&self) -> bool {
        *self == NetworkPolicy::default()
    }
}

/// Network of a VM in answers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmNetwork {
    /// `default`, or a user-defined network.
    pub name: String,
    /// Its MAC address, while it is on the network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// Its addresses, IPv4 first; none while it is not on the network.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<String>,
    /// Published ports of the host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<String>,
    /// Changes to what all VMs may reach.
    #[serde(default, skip_serializing_if = "NetworkPolicy::is_default")]
    pub policy: NetworkPolicy,
    /// TCP ports that the node's proxy may reach; `None`: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proxy_ports: Option<Vec<String>>,
    /// Counters of its link; only in `inspect`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub counters: Option<NetworkCounters>,
}

/// Counters of a VM's link since it was created.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkCounters {
    /// Packets that the VM sent.
    pub sent_packets: u64,
    /// Bytes of these packets.
    pub sent_bytes: u64,
    /// Packets that the VM received.
    pub received_packets: u64,
    /// Bytes of these packets.
    pub received_bytes: u64,
    /// Packets that it sent with another source address and that were dropped.
    pub spoofed: u64,
    /// Packets to destinations that its policy refuses.
    pub refused: u64,
}

/// A network of the node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    /// Its name.
    pub name: String,
    /// Address ranges of its VMs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranges: Vec<String>,
    /// Names of its VMs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vms: Vec<String>,
    /// Why its VMs have no link, as one sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
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

/// A volume attached to a VM.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VolumeUse {
    /// Name of the volume. It is created if it does not exist and a size is given.
    pub name: String,
    /// Size of a new volume in MiB.
    #[serde(default)]
    pub size_mib: Option<u64>,
    /// Attach it read-only.
    #[serde(default)]
    pub read_only: bool,
    /// Mount point of its ext4 file system in the guest; `None` leaves the mount to programs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mount: Option<String>,
    /// Limit on the guest's use.
    #[serde(default, skip_serializing_if = "DiskLimit::is_none")]
    pub limit: DiskLimit,
}

/// A disk for the VM's changes of its root file system. It is removed with the VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum RootDisk {
    /// The upper layer above the image, instead of the guest's memory.
    Layer {
        /// Size in MiB.
        size_mib: u64,
    },
    /// The whole image, as a clone that shares blocks with it. The image must be a writable file
    /// system.
    Copy {
        /// Copy the image's bytes if no clone can be made.
        #[serde(default)]
        plainly: bool,
    },
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
    /// RAM in MiB.
    pub memory_mib: u32,
    /// The first command's argv, if any.
    pub command: Option<Vec<String>>,
    /// The first command runs on a pseudo-terminal, so `attach` sets its terminal to raw mode.
    #[serde(default)]
    pub tty: bool,
    /// Volumes.
    pub disks: Vec<VolumeUse>,
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

/// Rate limits of a VM's disks and network interface, and its number of vCPUs. As the body of
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

/// Body of `POST /v1/vms/{vm}/snapshots`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MakeSnapshot {
    /// Name of the snapshot.
    pub name: String,
    /// Stop the VM once it is captured.
    #[serde(default)]
    pub stop: bool,
}

/// Result of a snapshot request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotMade {
    /// The snapshot.
    pub snapshot: Snapshot,
    /// Pause of the VM's vCPUs, nanoseconds.
    pub pause_ns: u64,
    /// Timeline of the capture.
    pub timeline: crate::timeline::Timeline,
}

/// A captured VM on disk.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Its name.
    pub name: String,
    /// Made by the node for later runs; `jiffy snapshot prune` removes it.
    #[serde(default)]
    pub golden: bool,
    /// Unix time, seconds.
    pub created: u64,
    /// Name of the captured VM.
    pub vm: String,
    /// The snapshot from which that VM was started.
    #[serde(default)]
    pub parent: Option<String>,
    /// Name of the image.
    pub image: String,
    /// BLAKE3 of the image, hexadecimal.
    pub image_digest: String,
    /// Name of the kernel.
    pub kernel: String,
    /// BLAKE3 of the kernel's file, hexadecimal.
    pub kernel_digest: String,
    /// BLAKE3 of the guests' initramfs, hexadecimal.
    pub initramfs_digest: String,
    /// vCPUs.
    pub cpus: u8,
    /// RAM in MiB.
    pub memory_mib: u32,
    /// Argv of the first command, if it was running.
    pub command: Option<Vec<String>>,
    /// That command runs on a pseudo-terminal.
    #[serde(default)]
    pub tty: bool,
    /// Volumes that were captured as well.
    #[serde(default)]
    pub volumes: Vec<VolumeUse>,
    /// Features of its processor; a host needs all of them to restore it.
    pub cpu_features: Vec<String>,
    /// How RAM is stored.
    pub memory: MemoryForm,
    /// Bytes of RAM on disk.
    pub memory_bytes: u64,
    /// Bytes of RAM that are shared with the snapshots on which it is built, as stored there. They
    /// are kept as long as this snapshot.
    #[serde(default)]
    pub shared_bytes: u64,
    /// Bytes of state and volumes on disk.
    pub other_bytes: u64,
    /// Its working set is stored first and fetched in advance.
    #[serde(default)]
    pub optimised: bool,
    /// Names of VMs that need it.
    #[serde(default)]
    pub used_by: Vec<String>,
    /// Names of the snapshots that are built on its RAM. If it is removed before them, its RAM is
    /// kept for them.
    #[serde(default)]
    pub children: Vec<String>,
    /// Why it can't be used, in one sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// How a snapshot stores RAM.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryForm {
    /// In a sparse file that VMs map.
    Raw,
    /// In an image of chunks that the pager serves.
    #[default]
    Image,
}

/// Contents of a snapshot's RAM.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryReport {
    /// Bytes of RAM.
    pub size: u64,
    /// Size of a chunk, bytes.
    pub chunk_bytes: u64,
    /// Bytes of the file on disk.
    pub file_bytes: u64,
    /// Bytes of the image's tables.
    pub metadata_bytes: u64,
    /// Time to read the tables, nanoseconds.
    pub load_ns: u64,
    /// Totals by kind of chunk.
    pub kinds: Vec<ChunkKind>,
    /// Ranges of chunks of one kind, in order; only if requested.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranges: Vec<ChunkRange>,
}

/// Totals of one kind of chunk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkKind {
    /// `zero`, `raw`, `lz4`, `zstd`, `zstd+dictionary`, `parent` (stored in the snapshot below) or
    /// `root` (stored in the root file system).
    pub kind: String,
    /// Number of chunks.
    pub chunks: u64,
    /// Their bytes of RAM.
    pub bytes: u64,
    /// Their bytes in the file.
    pub stored_bytes: u64,
}

/// A range of RAM whose chunks are of one kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkRange {
    /// Offset of the first byte.
    pub offset: u64,
    /// Length, bytes.
    pub length: u64,
    /// As in [`ChunkKind`].
    pub kind: String,
    /// Bytes in the file.
    pub stored_bytes: u64,
}

/// Golden snapshots or images that were removed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pruned {
    /// Their names.
    pub names: Vec<String>,
    /// Bytes that were freed.
    pub bytes: u64,
}

/// What a node knows of a request with a [`REQUEST_HEADER`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestState {
    /// This daemon, or an earlier one since the host started, has begun it; it may have failed.
    /// `None` if the daemon can't know. Only the last 32,768 requests are known.
    pub begun: Option<bool>,
}

/// The node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeInfo {
    /// Package version of the daemon.
    pub version: String,
    /// [`VERSION`].
    pub api: u32,
    /// The daemon's process id.
    pub pid: u32,
    /// Boot id, which identifies the clock of this node's timelines.
    pub clock: String,
    /// CLOCK_MONOTONIC now, nanoseconds.
    pub now_ns: u64,
    /// The data folder.
    pub data: String,
    /// Number of running VMs.
    pub running: u32,
    /// Number of all VMs.
    pub vms: u32,
    /// Ids of standbys.
    #[serde(default)]
    pub standbys: Vec<String>,
    /// Containment of VMMs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub containment: Option<Containment>,
}

/// How VMMs are contained.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Containment {
    /// Each has its own namespaces and an empty root.
    pub jailed: bool,
    /// Each also has its own user and group id, which needs root.
    pub own_user: bool,
    /// A control group limits each.
    pub cgroups: bool,
    /// The kernel has Landlock, which bounds the files of `jiffy-pager` and `jiffy-disk`; `None` of a
    /// node of an earlier release.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub landlock: Option<bool>,
    /// One sentence without a full stop for each of these that is missing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lacks: Vec<String>,
}

/// An image.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Image {
    /// Name or reference.
    pub name: String,
    /// BLAKE3 of the file system image, hexadecimal; empty while only its chunks are known.
    pub digest: String,
    /// Bytes of the file system image.
    pub size: u64,
    /// Number of files, folders and links in it.
    pub entries: u64,
    /// Unix time of import, seconds.
    pub created: u64,
    /// Run configuration of its commands.
    #[serde(default)]
    pub config: ImageConfig,
    /// Where it came from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<ImageSource>,
    /// Id of its image of chunks, hexadecimal, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chunks: Option<String>,
    /// Bytes of `size` that are stored here; the rest is fetched when it is read.
    #[serde(default)]
    pub present: u64,
    /// Bytes on disk.
    #[serde(default)]
    pub stored: u64,
    /// Names of VMs that need it.
    #[serde(default)]
    pub used_by: Vec<String>,
    /// Path of the file system image on the node's host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<std::path::PathBuf>,
    /// Why it can't be used, in one sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Run configuration of an image's commands (OCI image configuration).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ImageConfig {
    /// Prefix of every command.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub entrypoint: Vec<String>,
    /// Command if none is given.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cmd: Vec<String>,
    /// `NAME=value`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Working directory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workdir: Option<String>,
    /// `name`, `uid`, `name:group` or `uid:gid`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Signal that ends its command, such as `SIGINT` or `2`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_signal: Option<String>,
    /// Ports that it exposes, such as `80/tcp`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub exposed_ports: Vec<String>,
    /// Labels.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
}

/// Source of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageSource {
    /// Reference from which it was pulled, or a description of the import.
    pub reference: String,
    /// Digest of the manifest that was used, `sha256:…`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub manifest: Option<String>,
    /// Keys whose signatures were verified: `sha256:…` of each key's DER.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub signed_by: Vec<String>,
}

/// Format of an imported tar.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ImportKind {
    /// A root file system.
    Root,
    /// An OCI image layout (`oci-layout`, `index.json`, `blobs/`).
    Layout,
    /// A `docker save` archive (`manifest.json`).
    Docker,
}

/// Access to a registry.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RegistryAccess {
    /// User name and password.
    pub credentials: Option<(String, String)>,
    /// Token from a credential helper.
    pub identity_token: Option<String>,
    /// Use HTTP without TLS. Loopback registries are tried without TLS in any case.
    pub plain_http: bool,
    /// Certificates to trust besides the system's, PEM.
    pub ca: Option<String>,
    /// Public key, PEM; only manifests signed by it are accepted.
    pub verify_key: Option<String>,
    /// Registry of references without one.
    pub registry: Option<String>,
}

impl core::fmt::Debug for RegistryAccess {
    /// Leaves secrets out.
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let user = self.credentials.as_ref().map(|(user, _)| user);
        f.debug_struct("RegistryAccess")
            .field("user", &user)
            .field("plain_http", &self.plain_http)
            .field("registry", &self.registry)
            .finish_non_exhaustive()
    }
}

/// Body of `POST /v1/pulls`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PullImage {
    /// `HOST/REPO:TAG`, `HOST/REPO@DIGEST`, or a name of the default registry.
    pub reference: String,
    /// Ask the registry even if an image of this reference is stored here.
    #[serde(default)]
    pub renew: bool,
    /// Platform, such as `linux/amd64`; `None` means the host's.
    #[serde(default)]
    pub platform: Option<String>,
    /// Access to the registry.
    #[serde(default)]
    pub access: RegistryAccess,
}

/// Body of `POST /v1/pushes`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PushArtifact {
    /// Name of the image or snapshot.
    pub name: String,
    /// Kind of artifact; `None` looks for an image, then a snapshot.
    #[serde(default)]
    pub kind: Option<ArtifactKind>,
    /// `HOST/REPO:TAG`.
    pub reference: String,
    /// Access to the registry.
    #[serde(default)]
    pub access: RegistryAccess,
}

/// Kind of artifact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ArtifactKind {
    /// A root file system.
    Image,
    /// A captured VM.
    Snapshot,
}

/// Progress of a pull or push. The last one is `Pulled`, `PulledSnapshot`, `Pushed` or `Failed`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PullStep {
    /// Current step, in a few words.
    Doing(String),
    /// Progress of one blob.
    Blob {
        /// Its digest, `sha256:…`.
        digest: String,
        /// Bytes transferred.
        done: u64,
        /// Size in bytes.
        total: u64,
    },
    /// An image was pulled.
    Pulled {
        /// The image.
        image: Image,
        /// Bytes fetched over the network.
        fetched: u64,
    },
    /// A snapshot was pulled.
    PulledSnapshot {
        /// The snapshot.
        snapshot: Snapshot,
        /// Bytes fetched over the network.
        fetched: u64,
    },
    /// The artifact was pushed.
    Pushed {
        /// Digest of its manifest, `sha256:…`.
        manifest: String,
        /// Bytes uploaded.
        sent: u64,
        /// Bytes that the registry had already.
        had: u64,
    },
    /// It failed; nothing was changed.
    Failed(ApiError),
}

/// Body of `POST /v1/vms/{vm}/commit`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CommitVm {
    /// Name of the new image.
    pub image: String,
}

/// Result of a commit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Committed {
    /// The image.
    pub image: Image,
    /// Time for which the VM's programs were frozen, nanoseconds.
    pub pause_ns: u64,
    /// Bytes of the changes.
    pub bytes: u64,
}

/// A kernel that the node can boot.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelInfo {
    /// Name.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// BLAKE3, hexadecimal.
    pub digest: String,
    /// Why it can't be used, in one sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A volume.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Volume {
    /// Name.
    pub name: String,
    /// Size in MiB.
    pub size_mib: u64,
    /// Bytes on the node's disk.
    #[serde(default)]
    pub disk_bytes: u64,
    /// Names of the running VMs that use it.
    pub used_by: Vec<String>,
    /// Names of all VMs it belongs to, running or not.
    #[serde(default)]
    pub attached_to: Vec<String>,
    /// Why it can't be used, in one sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Body of `POST /v1/volumes/{name}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MakeVolume {
    /// Size in MiB.
    pub size_mib: u64,
    /// Do not make an ext4 file system on it.
    #[serde(default)]
    pub raw: bool,
}

/// Body of `POST /v1/volumes/{name}/resize`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResizeVolume {
    /// Size in MiB.
    pub size_mib: u64,
}

/// Result of a resize.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResizedVolume {
    /// The volume.
    pub volume: Volume,
    /// A note about its file system, as one sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
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

/// Body of every error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApiError {
    /// Kind of error, for programs.
    pub kind: ErrorKind,
    /// One sentence: what is wrong and where.
    pub message: String,
    /// A hint for the user, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// The queue is full, and the request should be sent again after this time: 1 to 60 seconds.
    /// The status is then 503, and the answer has the header `Retry-After`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_s: Option<u32>,
}

impl ApiError {
    /// Its HTTP status.
    pub fn status(&self) -> u16 {
        match self.retry_after_s {
            Some(_) => 503,
            None => self.kind.status(),
        }
    }
}

/// Kind of error, which determines the HTTP status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ErrorKind {
    /// 400: the request is not valid.
    Invalid,
    /// 401: no token, or a wrong one.
    Unauthorized,
    /// 404: no such VM, image, kernel, volume, or path in a guest.
    NotFound,
    /// 409: the name is taken, or the thing is in use.
    Conflict,
    /// 409: the VM is not in the state for this.
    WrongState,
    /// 507: not enough memory, vCPUs or disk space; 503: the queue is full.
    NoRoom,
    /// 502: the VM, its VMM or its agent failed.
    VmFailed,
    /// 502: a registry failed or can't be reached.
    Registry,
    /// 500: the node failed.
    Internal,
}

impl ErrorKind {
    /// Its HTTP status.
    pub fn status(self) -> u16 {
        match self {
            ErrorKind::Invalid => 400,
            ErrorKind::Unauthorized => 401,
            ErrorKind::NotFound => 404,
            ErrorKind::Conflict | ErrorKind::WrongState => 409,
            ErrorKind::NoRoom => 507,
            ErrorKind::VmFailed | ErrorKind::Registry => 502,
            ErrorKind::Internal => 500,
        }
    }
}
