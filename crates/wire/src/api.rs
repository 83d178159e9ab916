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
//! | `POST /v1/images/{name}` | a tar stream | [`Image`] |
//! | `DELETE /v1/images/{name}` | | 204 |
//! | `GET /v1/kernels` | | `[KernelInfo]` |
//! | `PUT /v1/kernels/{name}` | a kernel image | [`KernelInfo`] |
//! | `GET /v1/volumes` | | `[Volume]` |
//! | `DELETE /v1/volumes/{name}` | | 204 |
//! | `POST /v1/shutdown` | | 204; the daemon ends, VMs go on |
//!
//! `{vm}` is an id, a unique beginning of one, or a name. Upgrades send
//! `Connection: upgrade` and `Upgrade: jiffy-frames`. Errors are [`ApiError`].

use crate::agent::{Command, ExitStatus, Stream};
use serde::{Deserialize, Serialize};

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
    /// Image; none means `base`.
    #[serde(default)]
    pub image: Option<String>,
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
    /// The first command; none starts nothing: the VM waits for `exec`.
    #[serde(default)]
    pub command: Option<Command>,
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
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
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
}

/// Where a VM is in its life.
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
    /// Where it is in its life.
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
    /// How the VM ended, in one sentence, if not in order.
    pub error: Option<String>,
    /// Removed once it has ended.
    pub remove: bool,
    /// Warnings of the guest's init.
    #[serde(default)]
    pub warnings: Vec<String>,
    /// Where its memory came from, if it did not boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<Origin>,
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

/// A VM that was put to sleep.
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
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
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
    /// Flags of the processors it was made on, as /proc/cpuinfo names them.
    pub cpu_features: Vec<String>,
    /// How RAM is kept.
    pub memory: MemoryForm,
    /// Bytes that RAM takes on disk.
    pub memory_bytes: u64,
    /// Bytes of everything else: state and volumes, as far as they take room.
    pub other_bytes: u64,
    /// Its working set is stored first, and fetched before it is asked for.
    #[serde(default)]
    pub optimised: bool,
    /// Names of VMs that need it.
    #[serde(default)]
    pub used_by: Vec<String>,
}

/// How a snapshot keeps RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryForm {
    /// A sparse file that VMs map.
    Raw,
    /// An image of chunks that the pager serves.
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
    /// `zero`, `raw`, `lz4`, `zstd`, …
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

/// Golden snapshots that were forgotten.
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
}

/// An image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Image {
    /// Name.
    pub name: String,
    /// BLAKE3 of the file system image, hexadecimal.
    pub digest: String,
    /// Bytes of the file system image.
    pub size: u64,
    /// Files, folders and links in it.
    pub entries: u64,
    /// Unix time of import, seconds.
    pub created: u64,
}

/// A kernel the node can boot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelInfo {
    /// Name.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// BLAKE3, hexadecimal.
    pub digest: String,
}

/// A volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Volume {
    /// Name.
    pub name: String,
    /// Size in MiB.
    pub size_mib: u64,
    /// Names of the running VMs that use it.
    pub used_by: Vec<String>,
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
    /// 400: the request makes no sense.
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
            ErrorKind::VmFailed => 502,
            ErrorKind::Internal => 500,
        }
    }
}
