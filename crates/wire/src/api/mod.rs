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
//! | `POST /v1/vms/{vm}/exec?priority=P&wait_s=N` | [`crate::agent::Command`] | 101, then frames as above |
//! | `POST /v1/vms/{vm}/attach?priority=P&wait_s=N` | | 101, then frames as above, for the first command |
//! | `GET /v1/vms/{vm}/logs?follow=true&tail=N&source=command\|console\|vmm` | | a stream of frames [`LogChunk`] |
//! | `POST /v1/vms/{vm}/copy-in?path=P&priority=P&wait_s=N` | | 101, then [`crate::agent::CopyFrame`]s in, one [`crate::agent::CopyDone`] out |
//! | `POST /v1/vms/{vm}/copy-out?path=P&priority=P&wait_s=N` | | 101, then [`crate::agent::CopyFrame`]s out |
//! | `GET /v1/vms/{vm}/stat` | | [`crate::agent::Stat`] |
//! | `GET /v1/vms/{vm}/timeline` | | [`crate::timeline::Timeline`] |
//! | `POST /v1/vms/{vm}/pause` | | [`Vm`], its vCPUs stopped |
//! | `POST /v1/vms/{vm}/resume` | | [`Vm`], its vCPUs running |
//! | `POST /v1/vms/{vm}/fork` | [`ForkVm`] | [`Forked`], all children ready |
//! | `POST /v1/vms/{vm}/hibernate` | | [`Hibernated`] |
//! | `POST /v1/vms/{vm}/wake?priority=P&wait_s=N` | | [`Vm`], ready |
//! | `GET /v1/queue` | | `[Queued]`, in the order in which they will be served |
//! | `GET /v1/queue/{request}` | | a stream of lines [`Queued`], JSON: one for each place that it has, until it no longer waits |
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
//! | `POST /v1/vms/{vm}/limits?priority=P&wait_s=N` | [`Limits`] | [`Vm`] with its new limits |
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
//! | `GET /v1/events?vm=VM` | | a stream of lines [`Event`], JSON: what happens from now on; with `vm` to this VM only |
//! | `POST /v1/sched/trace?seconds=N` | | [`SchedTrace`], after so many seconds |
//! | `DELETE /v1/sched/trace` | | 204: the recording in progress ends now, and is answered |
//! | `POST /v1/shutdown` | | 204; the daemon ends, VMs keep running |
//!
//! Whether a request with the header [`REQUEST_HEADER`] was begun can be queried by its id, also
//! from a later daemon of the same boot.
//!
//! `{vm}` is an id, a unique prefix of one, or a name. Upgrades send `Connection: upgrade` and
//! `Upgrade: jiffy-frames`. Errors are [`ApiError`].

mod error;
mod event;
mod idle;
mod image;
mod network;
mod node;
mod queue;
mod registry;
mod sched;
mod snapshot;
mod vm;
mod volume;

pub use error::{ApiError, ErrorKind};
pub use event::{Action, Event, Subject};
pub use idle::{IdleAction, IdlePolicy, VmIdle};
pub use image::{CommitVm, Committed, Image, ImageConfig, ImageSource, ImportKind};
pub use network::{Network, NetworkCounters, NetworkPolicy, NetworkUse, VmNetwork};
pub use node::{Containment, KernelInfo, NodeInfo, RequestState};
pub use queue::{Priority, Purpose, Queued};
pub use registry::{ArtifactKind, PullImage, PullStep, PushArtifact, RegistryAccess};
pub use sched::{SchedRun, SchedThread, SchedTrace};
pub use snapshot::{
    ChunkKind, ChunkRange, MakeSnapshot, MemoryForm, MemoryReport, Pruned, Snapshot, SnapshotMade,
};
pub use vm::{
    CreateVm, ForkVm, Forked, Hibernated, Limits, LogChunk, NoCommand, Origin, RunVm, Vm, VmState,
};
pub use volume::{FolderUse, MakeVolume, ResizeVolume, ResizedVolume, RootDisk, Volume, VolumeUse};

/// Version of this API, part of every path.
pub const VERSION: u32 = 1;
/// Protocol name in `Upgrade:`.
pub const UPGRADE: &str = "jiffy-frames";
/// Header in which `/v1/run` returns the id of its VM.
pub const VM_ID_HEADER: &str = "jiffy-vm-id";
/// Header with an id that the client gives a request, 32 hexadecimal digits in lower case. With it
/// the client follows the request's place in the queue (`GET /v1/queue/{request}`), and queries later
/// whether it was begun (`GET /v1/requests/{id}`).
pub const REQUEST_HEADER: &str = "jiffy-request";
