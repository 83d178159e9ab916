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
//! | `POST /v1/vms/{vm}/start` | | [`Vm`] |
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
//! | `POST /v1/vms/{vm}/resume` | | [`Vm`], going on |
//! | `POST /v1/vms/{vm}/fork` | [`ForkVm`] | [`Forked`], all children ready |
//! | `POST /v1/vms/{vm}/hibernate` | | [`Hibernated`] |
//! | `POST /v1/vms/{vm}/wake` | | [`Vm`], ready |
//! | `POST /v1/vms/{vm}/snapshots` | [`MakeSnapshot`] | [`SnapshotMade`] |
//! | `GET /v1/snapshots?all=true` | | `[Snapshot]`; golden ones with `all` |
//! | `GET /v1/snapshots/{name}` | | [`Snapshot`] |
//! | `DELETE /v1/snapshots/{name}` | | 204 |
//! | `GET /v1/snapshots/{name}/memory?map=true` | | [`MemoryReport`], with its ranges if asked for |
//! | `GET /v1/snapshots/{name}/picture` | | a PNG of the address space |
//! | `POST /v1/snapshots/{name}/optimise` | | [`Snapshot`] |
//! | `POST /v1/snapshots/prune` | | [`Pruned`]: golden snapshots are forgotten |
//! | `GET /v1/images` | | `[Image]` |
//! | `POST /v1/images/{name}?kind=root\|layout\|docker&from=TEXT` | a tar stream; without a kind its first entry tells | [`Image`] |
//! | `GET /v1/images/{name}?registry=HOST` | | [`Image`] |
//! | `DELETE /v1/images/{name}` | | 204 |
//! | `POST /v1/prune/images` | | [`Pruned`]: images of references that no VM needs |
//! | `POST /v1/pulls` | [`PullImage`] | a stream of lines [`PullStep`], JSON |
//! | `POST /v1/pushes` | [`PushArtifact`] | a stream of lines [`PullStep`], JSON |
//! | `POST /v1/vms/{vm}/commit` | [`CommitVm`] | [`Committed`] |
//! | `POST /v1/vms/{vm}/policy` | [`NetworkPolicy`] | [`Vm`], which may reach that from now on |
//! | `GET /v1/networks` | | `[Network]` |
//! | `GET /v1/networks/{name}` | | [`Network`] |
//! | `POST /v1/networks/{name}` | | [`Network`], made |
//! | `DELETE /v1/networks/{name}` | | 204 |
//! | `GET /v1/kernels` | | `[KernelInfo]` |
//! | `PUT /v1/kernels/{name}` | a kernel image | [`KernelInfo`] |
//! | `GET /v1/volumes` | | `[Volume]` |
//! | `POST /v1/volumes/{name}` | [`MakeVolume`] | [`Volume`] |
//! | `POST /v1/volumes/{name}/resize` | [`ResizeVolume`] | [`ResizedVolume`] |
//! | `DELETE /v1/volumes/{name}` | | 204 |
//! | `POST /v1/vms/{vm}/disks/{name}`, `DELETE …` | | refused: no hot-plug |
//! | `POST /v1/shutdown` | | 204; the daemon ends, VMs go on |
//!
//! `{vm}` is an id, a unique beginning of one, or a name. Upgrades send
//! `Connection: upgrade` and `Upgrade: jiffy-frames`. Errors are [`ApiError`].

use crate::agent::{Command, ExitStatus, Stream};
use crate::vmm::DiskLimit;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Version of this API; part of every path.
pub const VERSION: u32 = 1;
/// The protocol named in `Upgrade:`.
pub const UPGRADE: &str = "jiffy-frames";
/// The header with which `/v1/run` tells the id of its VM.
pub const VM_ID_HEADER: &str = "jiffy-vm-id";

/// What `POST /v1/vms` makes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CreateVm {
    /// A name; none makes one up.
    #[serde(default)]
    pub name: Option<String>,
    /// Image: a name, or a reference like `HOST/REPO:TAG`; none means `base`.
    #[serde(default)]
    pub image: Option<String>,
    /// The registry of references that name none.
    #[serde(default)]
    pub registry: Option<String>,
    /// Kernel by name; none means `base`.
    #[serde(default)]
    pub kernel: Option<String>,
    /// vCPUs; none means 1.
    #[serde(default)]
    pub cpus: Option<u8>,
    /// RAM in MiB; none means 128.
    #[serde(default)]
    pub memory_mib: Option<u32>,
    /// Host pages that back RAM.
    #[serde(default)]
    pub pages: crate::vmm::PageSize,
    /// Volumes, `/dev/vdb` first.
    #[serde(default)]
    pub disks: Vec<VolumeUse>,
    /// Keep what the VM changes in its root file system on a disk; none keeps
    /// it in the guest's memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root_disk: Option<RootDisk>,
    /// How fast the guest may use the disks of its root file system, each.
    #[serde(default, skip_serializing_if = "DiskLimit::is_none")]
    pub root_limit: DiskLimit,
    /// The first command; none starts nothing: the VM waits for `exec`. Its
    /// argv comes after the image's entrypoint; an empty one is the image's.
    #[serde(default)]
    pub command: Option<Command>,
    /// Takes the place of the image's entrypoint and its arguments.
    #[serde(default)]
    pub entrypoint: Option<Vec<String>>,
    /// What to do if neither the request nor the image says a command.
    #[serde(default)]
    pub no_command: NoCommand,
    /// Hand PID 1 to this program and its arguments (`/sbin/init`).
    #[serde(default)]
    pub init: Option<Vec<String>>,
    /// A serial console into `jiffy logs --console`.
    #[serde(default)]
    pub console: bool,
    /// Remove the VM when it has ended.
    #[serde(default)]
    pub remove: bool,
    /// Host name in the guest; none means the VM's name.
    #[serde(default)]
    pub hostname: Option<String>,
    /// Further kernel parameters.
    #[serde(default)]
    pub kernel_args: Option<String>,
    /// What of the host's processor the VM is shown; none for all. Such a VM boots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_profile: Option<crate::cpu::Wanted>,
    /// Report the kernel's milestones on the timeline.
    #[serde(default)]
    pub timeline: bool,
    /// Go on from this snapshot instead of booting. It decides what the VM is
    /// made of; a command takes the place of the one that was captured.
    #[serde(default)]
    pub from: Option<String>,
    /// Boot even where a golden snapshot would do.
    #[serde(default)]
    pub cold: bool,
    /// Its network; nothing asked for is the network `default`, where the node can have one.
    #[serde(default, skip_serializing_if = "NetworkUse::is_default")]
    pub network: NetworkUse,
}

/// A VM's network: which, and what it may reach and be reached by.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkUse {
    /// `none`, `default`, or one that was made; VMs of one that was made see each other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The host's ports that lead to it: `[ADDRESS:]HOST[-HOST]:GUEST[-GUEST][/udp]`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<String>,
    /// All ports that its image names, too, each by a free port of the host's.
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    pub publish_all: bool,
    /// What it may reach.
    #[serde(default, skip_serializing_if = "NetworkPolicy::is_default")]
    pub policy: NetworkPolicy,
    /// Name servers in place of the node's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dns: Vec<String>,
    /// Domains in which short names are looked up, before the node's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub search: Vec<String>,
    /// Further lines of its /etc/hosts: `NAME:ADDRESS`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<String>,
}

impl NetworkUse {
    /// Was nothing asked for?
    pub fn is_default(&self) -> bool {
        *self == NetworkUse::default()
    }
}

/// What a VM may reach beside, or not of, what all VMs may:
/// `TARGET[:PORT[-PORT]][/tcp|/udp]`, where TARGET is `all`, `host`, an address, a range, a
/// name or `*.NAME`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkPolicy {
    /// Reached whatever else is said.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allow: Vec<String>,
    /// Not reached, unless allowed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub deny: Vec<String>,
}

impl NetworkPolicy {
    /// Is it what holds for every VM?
    pub fn is_default(&self) -> bool {
        *self == NetworkPolicy::default()
    }
}

/// A VM's network as the API shows it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmNetwork {
    /// `default`, or one that was made.
    pub name: String,
    /// Its MAC address, while it is on the network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// Its addresses, IPv4 first; none while it is not on the network.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<String>,
    /// The host's ports that lead to it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<String>,
    /// What it may reach beside, or not of, what all VMs may.
    #[serde(default, skip_serializing_if = "NetworkPolicy::is_default")]
    pub policy: NetworkPolicy,
    /// What went through its link; only where one VM is asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub counters: Option<NetworkCounters>,
}

/// What went through a VM's link since it is there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkCounters {
    /// Packets that the VM sent, and their bytes.
    pub sent_packets: u64,
    /// See `sent_packets`.
    pub sent_bytes: u64,
    /// Packets that it received, and their bytes.
    pub received_packets: u64,
    /// See `received_packets`.
    pub received_bytes: u64,
    /// Packets that it sent from addresses that are not its own, and that were dropped.
    pub spoofed: u64,
    /// Packets to where it may not reach.
    pub refused: u64,
}

/// A network of the node's.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    /// Its name.
    pub name: String,
    /// Ranges that its VMs have addresses of.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranges: Vec<String>,
    /// Names of its VMs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vms: Vec<String>,
    /// Why VMs of it have no link, in one sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// What an empty first command means when the image has none either.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NoCommand {
    /// It is refused.
    #[default]
    Refuse,
    /// It is a shell, `/bin/sh`.
    Shell,
    /// There is no first command: the VM waits for `exec`.
    Wait,
}

/// What `POST /v1/run` makes, starts and attaches to.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunVm {
    /// The VM.
    pub vm: CreateVm,
    /// Answer with [`Vm`] (200) once started, instead of attaching.
    #[serde(default)]
    pub detach: bool,
}

/// A volume attached to a VM.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VolumeUse {
    /// Name; made when it does not exist and a size is given.
    pub name: String,
    /// Size in MiB for a new one.
    #[serde(default)]
    pub size_mib: Option<u64>,
    /// Refuse writes.
    #[serde(default)]
    pub read_only: bool,
    /// Where the guest mounts its ext4 file system; none leaves that to its
    /// programs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mount: Option<String>,
    /// How fast the guest may use it.
    #[serde(default, skip_serializing_if = "DiskLimit::is_none")]
    pub limit: DiskLimit,
}

/// A disk of the VM's own for what it changes in its root file system. It is
/// removed with the VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum RootDisk {
    /// The upper layer over the image, in place of memory of the guest.
    Layer {
        /// Its size in MiB.
        size_mib: u64,
    },
    /// The whole image, which must be a file system that can be written to,
    /// as a clone that shares blocks with it.
    Copy {
        /// Copy the image byte by byte where no clone can be made.
        #[serde(default)]
        plainly: bool,
    },
}

/// State of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VmState {
    /// Made, never started, or stopped and ready to start again.
    Created,
    /// The VMM runs; the agent isn't ready.
    Starting,
    /// The agent is ready.
    Running,
    /// Its vCPUs are stopped, on request.
    Paused,
    /// On its way to the end.
    Stopping,
    /// Its memory is on disk, and it has no VMM until it is woken.
    Hibernated,
    /// Ended.
    Exited,
}

/// A VM as the API shows it.
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
    /// vCPUs.
    pub cpus: u8,
    /// RAM in MiB.
    pub memory_mib: u32,
    /// The first command's argv, if any.
    pub command: Option<Vec<String>>,
    /// The first command runs on a pseudo-terminal: `attach` makes its own raw.
    #[serde(default)]
    pub tty: bool,
    /// Volumes.
    pub disks: Vec<VolumeUse>,
    /// The disk of its own that keeps what it changes in its root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root_disk: Option<RootDisk>,
    /// Ports its image says it listens on, like `80/tcp`.
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
    /// The VMM's process id while it runs.
    pub pid: Option<u32>,
    /// vsock context id.
    pub cid: u32,
    /// How the first command ended.
    pub exit: Option<ExitStatus>,
    /// How the VM ended, in one sentence, if not in order; or what is wrong
    /// with one that runs or sleeps.
    pub error: Option<String>,
    /// Removed once it has ended.
    pub remove: bool,
    /// Warnings of the guest's init.
    #[serde(default)]
    pub warnings: Vec<String>,
    /// Where its memory came from, if it did not boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<Origin>,
    /// Its network, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<VmNetwork>,
}

/// Where the memory of a VM that did not boot came from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// A snapshot of this name.
    From(String),
    /// A VM of this name, live.
    ForkedFrom(String),
    /// A golden snapshot: for the VM's owner the same as a cold boot.
    Golden,
}

/// What `POST /v1/vms/{vm}/fork` makes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ForkVm {
    /// How many children; none means 1.
    #[serde(default)]
    pub count: Option<u32>,
    /// The child's name; of several, `NAME-1`, `NAME-2`, … None makes names up.
    #[serde(default)]
    pub name: Option<String>,
}

/// Children of a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Forked {
    /// The children, each ready.
    pub vms: Vec<Vm>,
    /// How long the parent's vCPUs stood still, nanoseconds.
    pub pause_ns: u64,
    /// Where the time went on the parent's side.
    pub timeline: crate::timeline::Timeline,
}

/// A VM that was hibernated.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hibernated {
    /// The VM.
    pub vm: Vm,
    /// Bytes its memory and state take on disk.
    pub bytes: u64,
    /// Where the time went.
    pub timeline: crate::timeline::Timeline,
}

/// What `POST /v1/vms/{vm}/snapshots` makes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MakeSnapshot {
    /// Its name.
    pub name: String,
    /// End the VM once it is captured.
    #[serde(default)]
    pub stop: bool,
}

/// A snapshot that was just made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotMade {
    /// The snapshot.
    pub snapshot: Snapshot,
    /// How long the VM's vCPUs stood still, nanoseconds.
    pub pause_ns: u64,
    /// Where the time went.
    pub timeline: crate::timeline::Timeline,
}

/// A captured VM on disk.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Its name.
    pub name: String,
    /// Kept by the node for later runs; `jiffy snapshot prune` removes it.
    #[serde(default)]
    pub golden: bool,
    /// Unix time, seconds.
    pub created: u64,
    /// The VM that was captured, by name.
    pub vm: String,
    /// The snapshot that VM itself came from.
    #[serde(default)]
    pub parent: Option<String>,
    /// Image by name.
    pub image: String,
    /// BLAKE3 of the image, hexadecimal.
    pub image_digest: String,
    /// Kernel by name.
    pub kernel: String,
    /// BLAKE3 of the kernel's file, hexadecimal.
    pub kernel_digest: String,
    /// BLAKE3 of the guests' initramfs, hexadecimal.
    pub initramfs_digest: String,
    /// vCPUs.
    pub cpus: u8,
    /// RAM in MiB.
    pub memory_mib: u32,
    /// The first command, if it was running.
    pub command: Option<Vec<String>>,
    /// That command runs on a pseudo-terminal.
    #[serde(default)]
    pub tty: bool,
    /// Volumes, captured with it.
    #[serde(default)]
    pub volumes: Vec<VolumeUse>,
    /// Features of its processor, all of which a host must have that it is restored on.
    pub cpu_features: Vec<String>,
    /// How RAM is kept.
    pub memory: MemoryForm,
    /// Bytes that RAM takes on disk.
    pub memory_bytes: u64,
    /// Bytes of RAM that it has in common with the snapshots it is built on,
    /// as stored there. They stay as long as it does.
    #[serde(default)]
    pub shared_bytes: u64,
    /// Bytes of everything else: state and volumes, as far as they take room.
    pub other_bytes: u64,
    /// Its working set is stored first, and fetched before it is asked for.
    #[serde(default)]
    pub optimised: bool,
    /// Names of VMs that need it.
    #[serde(default)]
    pub used_by: Vec<String>,
    /// Names of the snapshots that are built on its RAM. It may be removed
    /// before they are; its RAM then stays for them.
    #[serde(default)]
    pub children: Vec<String>,
    /// Why it can't be used, in one sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// How a snapshot keeps RAM.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryForm {
    /// A sparse file that VMs map.
    Raw,
    /// An image of chunks that the pager serves.
    #[default]
    Image,
}

/// What is in a snapshot's RAM.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryReport {
    /// Bytes of RAM.
    pub size: u64,
    /// Bytes of a chunk.
    pub chunk_bytes: u64,
    /// Bytes of the file, as far as it takes room.
    pub file_bytes: u64,
    /// Bytes of the image's own tables.
    pub metadata_bytes: u64,
    /// What reading those tables took, nanoseconds.
    pub load_ns: u64,
    /// Each kind of chunk there is.
    pub kinds: Vec<ChunkKind>,
    /// Ranges of equal kind, in order; only if asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranges: Vec<ChunkRange>,
}

/// How many chunks are kept in some way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkKind {
    /// `zero`, `raw`, `lz4`, `zstd`, `zstd+dictionary`, `parent` (in what it is
    /// built on) or `root` (in the root file system).
    pub kind: String,
    /// Chunks.
    pub chunks: u64,
    /// Bytes of RAM they are.
    pub bytes: u64,
    /// Bytes they take in the file.
    pub stored_bytes: u64,
}

/// A range of RAM whose chunks are kept in the same way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkRange {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// As in [`ChunkKind`].
    pub kind: String,
    /// Bytes they take in the file.
    pub stored_bytes: u64,
}

/// Golden snapshots or images that were removed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pruned {
    /// Their names.
    pub names: Vec<String>,
    /// Bytes that are free again.
    pub bytes: u64,
}

/// The node itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeInfo {
    /// Package version of the daemon.
    pub version: String,
    /// [`VERSION`].
    pub api: u32,
    /// The daemon's process id.
    pub pid: u32,
    /// Boot id: names the clock of this node's timelines.
    pub clock: String,
    /// CLOCK_MONOTONIC now, nanoseconds.
    pub now_ns: u64,
    /// Where it keeps its data.
    pub data: String,
    /// Running VMs.
    pub running: u32,
    /// All VMs.
    pub vms: u32,
    /// Ids that VMs restored ahead of runs will have.
    #[serde(default)]
    pub standbys: Vec<String>,
    /// Ranges that VMs have addresses of, or why they have no network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<String>,
}

/// An image.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Image {
    /// Name, or reference.
    pub name: String,
    /// BLAKE3 of the file system image, hexadecimal; empty while it is known
    /// by its chunks only.
    pub digest: String,
    /// Bytes of the file system image.
    pub size: u64,
    /// Files, folders and links in it.
    pub entries: u64,
    /// Unix time of import, seconds.
    pub created: u64,
    /// What its commands are started with.
    #[serde(default)]
    pub config: ImageConfig,
    /// Where it came from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<ImageSource>,
    /// Id of its image of chunks, hexadecimal, if it has been made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chunks: Option<String>,
    /// Bytes of `size` that are here; the rest is fetched when it is read.
    #[serde(default)]
    pub present: u64,
    /// Bytes that it takes on disk.
    #[serde(default)]
    pub stored: u64,
    /// Names of VMs that need it.
    #[serde(default)]
    pub used_by: Vec<String>,
    /// The file system image on the node's host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<std::path::PathBuf>,
    /// Why it can't be used, in one sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// What the commands of an image are started with (OCI image configuration).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ImageConfig {
    /// Comes before every command.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub entrypoint: Vec<String>,
    /// The command if none is given.
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
    /// What ends its command in order, like `SIGINT` or `2`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_signal: Option<String>,
    /// Ports it listens on, like `80/tcp`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub exposed_ports: Vec<String>,
    /// Labels.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
}

/// Where an image came from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageSource {
    /// The reference it was pulled by, or what it was imported from.
    pub reference: String,
    /// Digest of the manifest that was used, `sha256:…`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub manifest: Option<String>,
    /// Keys that were found to have signed it, `sha256:…` of each as DER.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub signed_by: Vec<String>,
}

/// How the tar of an import is to be understood.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ImportKind {
    /// A root file system.
    Root,
    /// An OCI image layout (`oci-layout`, `index.json`, `blobs/`).
    Layout,
    /// What `docker save` writes (`manifest.json`).
    Docker,
}

/// Access to a registry.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RegistryAccess {
    /// User name and password.
    pub credentials: Option<(String, String)>,
    /// A token from a credential helper.
    pub identity_token: Option<String>,
    /// HTTP without TLS; loopback registries are tried so anyway.
    pub plain_http: bool,
    /// Certificates to trust beside the system's, PEM.
    pub ca: Option<String>,
    /// Public key, PEM: only manifests it has signed are taken.
    pub verify_key: Option<String>,
    /// The registry of references that name none.
    pub registry: Option<String>,
}

impl core::fmt::Debug for RegistryAccess {
    /// Without what is secret.
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let user = self.credentials.as_ref().map(|(user, _)| user);
        f.debug_struct("RegistryAccess")
            .field("user", &user)
            .field("plain_http", &self.plain_http)
            .field("registry", &self.registry)
            .finish_non_exhaustive()
    }
}

/// What `POST /v1/pulls` fetches.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PullImage {
    /// `HOST/REPO:TAG`, `HOST/REPO@DIGEST`, or a name of the default registry.
    pub reference: String,
    /// Ask the registry even if an image of this reference is here.
    #[serde(default)]
    pub renew: bool,
    /// `linux/amd64`; none means the host's.
    #[serde(default)]
    pub platform: Option<String>,
    /// The registry.
    #[serde(default)]
    pub access: RegistryAccess,
}

/// What `POST /v1/pushes` sends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PushArtifact {
    /// The image or snapshot.
    pub name: String,
    /// What `name` is; none means whichever there is, images first.
    #[serde(default)]
    pub kind: Option<ArtifactKind>,
    /// `HOST/REPO:TAG`.
    pub reference: String,
    /// The registry.
    #[serde(default)]
    pub access: RegistryAccess,
}

/// What can be pushed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ArtifactKind {
    /// A root file system.
    Image,
    /// A captured VM.
    Snapshot,
}

/// How far a pull or push is. The last one is `Pulled`, `Pushed` or `Failed`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PullStep {
    /// What is being done, in a few words.
    Doing(String),
    /// Bytes of one blob.
    Blob {
        /// Its digest, `sha256:…`.
        digest: String,
        /// Bytes that are there.
        done: u64,
        /// Bytes it has.
        total: u64,
    },
    /// The image is here.
    Pulled {
        /// The image.
        image: Image,
        /// Bytes that came over the network for this pull.
        fetched: u64,
    },
    /// A snapshot is here.
    PulledSnapshot {
        /// The snapshot.
        snapshot: Snapshot,
        /// Bytes that came over the network for this pull.
        fetched: u64,
    },
    /// It is in the registry.
    Pushed {
        /// Digest of its manifest, `sha256:…`.
        manifest: String,
        /// Bytes that were sent.
        sent: u64,
        /// Bytes that were there already.
        had: u64,
    },
    /// It failed; nothing was changed.
    Failed(ApiError),
}

/// What `POST /v1/vms/{vm}/commit` makes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CommitVm {
    /// Name of the new image.
    pub image: String,
}

/// An image that was made of a VM's root.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Committed {
    /// The image.
    pub image: Image,
    /// How long the VM's programs stood still, nanoseconds.
    pub pause_ns: u64,
    /// Bytes the changes take.
    pub bytes: u64,
}

/// A kernel the node can boot.
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
    /// Bytes it takes on the node's disk.
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

/// What `POST /v1/volumes/{name}` makes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MakeVolume {
    /// Size in MiB.
    pub size_mib: u64,
    /// Leave it empty instead of making an ext4 file system on it.
    #[serde(default)]
    pub raw: bool,
}

/// The new size in `POST /v1/volumes/{name}/resize`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResizeVolume {
    /// Size in MiB.
    pub size_mib: u64,
}

/// A volume that was resized.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResizedVolume {
    /// The volume.
    pub volume: Volume,
    /// What is to be known of the file system on it, in one sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// A piece of a log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogChunk {
    /// Which stream; console and VMM logs are all stdout.
    pub stream: Stream,
    /// The bytes.
    #[serde(with = "serde_bytes")]
    pub data: Vec<u8>,
}

/// Every error of the API.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApiError {
    /// What kind, for programs.
    pub kind: ErrorKind,
    /// One sentence: what was wrong and where.
    pub message: String,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

/// What kind of error, and its HTTP status.
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
    /// 507: memory or disk is used up.
    NoRoom,
    /// 502: the VM, its VMM or its agent failed.
    VmFailed,
    /// 502: a registry failed, or can't be reached.
    Registry,
    /// 500: the node failed.
    Internal,
}

impl ErrorKind {
    /// The HTTP status it is sent with.
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
