//! Cases and their outcomes, as JSON between the host and the probe.

use crate::traffic::Traffic;
use crate::work::Work;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// A case: what to measure and how often.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Case {
    /// Name, such as `boot/same-kernel/pid1`.
    pub name: String,
    /// The VMM: `jiffy`, `firecracker`, …
    pub monitor: String,
    /// What to measure.
    pub kind: Kind,
    /// Measured runs.
    pub runs: u32,
    /// Runs before them that are discarded.
    pub warm_up: u32,
}

impl fmt::Display for Case {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} {}", self.name, self.monitor)
    }
}

/// What to measure. In each argument `{run}` is replaced by the run's number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// From spawn to the byte [`MARKER`] on stdout; then the process is killed.
    ToMarker {
        /// Program and arguments; `{events}` is replaced by the number of an inherited descriptor
        /// on which the program may report spans.
        argv: Vec<String>,
        /// Guest RAM in MiB, to separate it from the VMM's own memory.
        ram_mib: u64,
    },
    /// Boots a VM once and captures it into a file; measures from the spawn of a VMM that restores
    /// it to the next byte on stdout.
    Restore {
        /// File with the `VmmConfig` of the VM, which has a control socket and whose guest writes
        /// [`MARKER`] repeatedly.
        config: String,
        /// Measures instead from the `TakeSpare` of an existing spare VMM until its vCPUs are
        /// resumed.
        spare: bool,
    },
    /// Like `Restore`, with the captured RAM in a compressed image, [`IMAGE`], that a pager serves.
    Lazy {
        /// See [`Kind::Restore`].
        config: String,
        /// What the pager knows of the working set.
        how: LazyMode,
        /// Measures instead from the `TakeSpare` of an existing spare VMM.
        spare: bool,
    },
    /// Boots a VM with Firecracker and makes a snapshot; measures from the spawn of another
    /// Firecracker that restores it to the next byte on stdout.
    FirecrackerRestore {
        /// The program.
        program: String,
        /// The kernel, as a path in the machine.
        kernel: String,
        /// The initramfs, whose guest writes [`MARKER`] repeatedly.
        initramfs: String,
        /// Kernel parameters.
        command_line: String,
        /// Guest RAM in MiB.
        ram_mib: u64,
    },
    /// Captures an idle VM of the node. Counter [`BYTES`]: its size on disk.
    SnapshotBytes,
    /// Forks an idle VM of the node. Counter [`BYTES`]: memory that only the child's VMM has mapped
    /// once the child is idle.
    CloneMemory,
    /// Watches an idle VM of the node. Counters [`INSTRUCTIONS`] and [`WAKE_UPS`].
    Idle,
    /// Forks an idle VM of the node into many, which then answer. Counters [`BYTES`] (the machine's
    /// memory per clone, everything included) and [`DAEMON_BYTES`].
    Clones {
        /// Number of clones.
        count: u32,
    },
    /// Lists many VMs, of which none runs. Counter [`LIST`].
    List {
        /// Number of VMs.
        count: u32,
    },
    /// Starts many commands at once; measures each from spawn to its first byte of output, one
    /// sample each.
    AtOnce {
        /// Number of commands.
        count: u32,
        /// Program and arguments. `--name` has a VM's name, in which `{run}` is replaced by a
        /// number of the command's own.
        argv: Vec<String>,
        /// Runs before each run but the first, repeatedly until it succeeds.
        once: Vec<String>,
        /// Runs afterwards for each command, to clean up.
        after: Vec<String>,
    },
    /// Requests runs at once on a node with other work; measures each from its request to the first
    /// byte of its command's answer, one sample each. Counters [`OTHERS`] and [`WORK`].
    Burst {
        /// The runs and the other work.
        burst: Burst,
        /// Runs before each run but the first, repeatedly until it succeeds.
        once: Vec<String>,
    },
    /// Boots a VM once; measures from the request of its capture until the vCPUs of a child, whose
    /// VMM was a spare, are resumed. The span `pause` is the parent's pause.
    Fork {
        /// See [`Kind::Restore`].
        config: String,
    },
    /// Boots a VM and captures it fully in each run; measures its pause.
    Pause {
        /// See [`Kind::Restore`].
        config: String,
    },
    /// From the first [`MARKER`] on stdout to the second; in between the guest reads its disk.
    Disk {
        /// Program and arguments.
        argv: Vec<String>,
        /// Whether the file is in the page cache.
        warm: bool,
    },
    /// From the first [`MARKER`] on stdout to the second; in between the guest works in a shared
    /// folder.
    Folder {
        /// Program and arguments.
        argv: Vec<String>,
        /// What serves the folder.
        server: FolderServer,
        /// What the guest does.
        work: Work,
    },
    /// Creates the layer of a root disk as the node does.
    CreateRoot {
        /// Size of the disk, bytes.
        bytes: u64,
    },
    /// Clones an ext4 image to a root disk as the node does.
    CloneRoot {
        /// Size of the disk, bytes.
        bytes: u64,
    },
    /// Runs a shell command of an image that is in the registry, on a node that has nothing of it.
    /// Counter [`BYTES`]: bytes on loopback until the first byte of the answer.
    FirstAnswer {
        /// The image.
        reference: String,
        /// Bytes of the image in the registry: counter [`WHOLE`].
        bytes: u64,
    },
    /// A VM's network.
    Network(Network),
    /// Requests by the node's HTTP proxy.
    Proxy(ProxyUse),
    /// Restarts the daemon of a node with many hibernated VMs, some of which have published ports.
    /// Counters [`DAEMON_START`] and [`DAEMON_BYTES`].
    Sleepers {
        /// Number of VMs.
        count: u32,
    },
    /// From spawn to exit with status 0.
    ToExit {
        /// An image that is pulled before the first run.
        pull: Option<String>,
        /// Runs repeatedly until it succeeds: before each run but the first and, with `pull`,
        /// after the first.
        once: Option<Vec<String>>,
        /// Runs before each run; then the probe waits until the machine is idle.
        before: Option<Vec<String>>,
        /// Program and arguments.
        argv: Vec<String>,
        /// Runs after `argv` and prints a timeline as JSON.
        timeline: Option<Vec<String>>,
        /// Runs last, to clean up.
        after: Option<Vec<String>>,
    },
}

/// What to measure of a VM's network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Network {
    /// Makes the host's side for one VM as the node does: address, link, route, rules, name.
    HostSetup,
    /// The same by commands, from the first one's spawn to the last one's exit.
    HostSetupBy(HostCommands),
    /// From the start of `jiffy run`, or of a connection to a VM that sleeps, to a byte from a TCP
    /// server in the guest.
    ToAnswer(Start),
    /// From the first command for the host's side to a byte from the same server in the guest of
    /// another VMM.
    PeerToAnswer {
        /// The host's side.
        host: HostCommands,
        /// Program and arguments.
        argv: Vec<String>,
    },
    /// Traffic between a running guest and the host.
    Traffic {
        /// Program and arguments.
        argv: Vec<String>,
        /// How it gets its TAP.
        tap: TapUse,
        /// What passes.
        traffic: Traffic,
    },
}

/// What to measure of the proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProxyUse {
    /// From a request for a VM that sleeps to the first byte of its answer.
    Wake,
    /// What the proxy adds to a request for a VM that is awake; the client keeps its connection.
    Overhead,
}

/// How a VM starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Start {
    /// It boots.
    Cold,
    /// From a golden snapshot.
    Golden,
    /// It is hibernated.
    Asleep,
}

/// Runs that are requested at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Burst {
    /// Number of runs.
    pub size: u32,
    /// How their VMs start.
    pub start: BurstStart,
    /// Whether two owners request them, one of them a fifth, and the node has room for few at once.
    pub owners: bool,
    /// What else the node does.
    pub load: Load,
    /// What schedules the node.
    pub scheduler: Scheduler,
}

/// How the VMs of a burst start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BurstStart {
    /// From a golden snapshot.
    Golden,
    /// They boot.
    Cold,
    /// They boot from an image that was pulled just before, and whose blocks the registry sends on
    /// demand.
    Pulled,
}

/// What schedules a node's processors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scheduler {
    /// The machine's usual kernel.
    #[default]
    Usual,
    /// The kernel that has sched_ext, by its own EEVDF.
    Eevdf,
    /// The same kernel, by the policy of `jiffy-sched`.
    SchedExt,
}

impl Scheduler {
    /// Whether this needs the kernel that has sched_ext.
    pub fn needs_sched_ext(self) -> bool {
        self != Scheduler::Usual
    }
}

/// What a node does when a burst is requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Load {
    /// Nothing.
    Idle,
    /// Four VMs run programs that never wait.
    Programs,
    /// Sixteen do.
    ManyPrograms,
    /// Two VMs write to their disks without end, and wait for each 16 MiB to be there.
    Disk,
    /// A snapshot of a VM is compressed.
    Compression,
    /// A golden snapshot of another kind of VM is made.
    GoldenSnapshot,
    /// A VM reads an image whose blocks the registry sends on demand, and the pager reads ahead.
    Reading,
    /// The caches exceed their limit, and are trimmed.
    Trimming,
}

impl Load {
    /// Whether its VM has an image of the registry.
    pub fn needs_registry(self) -> bool {
        matches!(self, Load::Reading | Load::Trimming)
    }
}

/// What serves a shared folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FolderServer {
    /// `jiffy-files`.
    Jiffy,
    /// virtiofsd: its program and arguments.
    Virtiofsd(Vec<String>),
}

/// How a VMM gets its TAP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TapUse {
    /// It inherits [`TAP_DESCRIPTOR`].
    Inherited,
    /// It opens [`TAP`].
    Named,
}

/// The TAP of a VMM that is measured without a node.
pub const TAP: &str = "bench0";

/// Number of the TAP's descriptor.
pub const TAP_DESCRIPTOR: i32 = 100;

/// Commands for the host's side of a VM's network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostCommands {
    /// They make it.
    pub make: Vec<Vec<String>>,
    /// They remove it.
    pub remove: Vec<Vec<String>>,
}

/// What a case needs of the machine's kernel and of its daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Needs {
    /// What schedules the machine.
    pub scheduler: Scheduler,
    /// Whether the limit of the daemon's caches is [`SMALL_CACHE`].
    pub small_cache: bool,
}

/// A limit of caches that one image exceeds, bytes.
pub const SMALL_CACHE: u64 = 4 << 20;

impl Kind {
    /// What it needs of the machine and its daemon.
    pub fn needs(&self) -> Needs {
        match self {
            Kind::Burst { burst, .. } => Needs {
                scheduler: burst.scheduler,
                small_cache: burst.load == Load::Trimming,
            },
            _ => Needs::default(),
        }
    }

    /// Whether so many VMs exist at once that the machine needs more memory than usual.
    pub fn needs_much_memory(&self) -> bool {
        matches!(
            self,
            Kind::AtOnce { .. } | Kind::Burst { .. } | Kind::Clones { .. }
        )
    }

    /// Whether the first run captures a VM that the other runs use.
    pub fn uses_one_capture(&self) -> bool {
        matches!(
            self,
            Kind::Restore { .. }
                | Kind::Lazy { .. }
                | Kind::FirecrackerRestore { .. }
                | Kind::Fork { .. }
        )
    }
}

/// The byte that PID 1 of the benchmark's initramfs writes to COM1.
pub const MARKER: u8 = b'J';

/// First byte of a measuring guest's error message; a line follows.
pub const FAILURE: u8 = b'!';

/// Vsock socket of a VMM without a node.
pub const VSOCK: &str = "/tmp/bench-vsock.sock";

/// Counter of cases that measure bytes.
pub const BYTES: &str = "bytes";

/// Counter: instructions per second.
pub const INSTRUCTIONS: &str = "instructions_per_second";

/// Counter: wake-ups in a thousand seconds.
pub const WAKE_UPS: &str = "wake_ups_per_thousand_seconds";

/// Counter: resident memory of the daemon, bytes.
pub const DAEMON_BYTES: &str = "daemon_bytes";

/// Counter: time from the command that starts the daemon to its answer, nanoseconds.
pub const DAEMON_START: &str = "daemon_start_ns";

/// Counter: instructions of a list of all VMs.
pub const LIST: &str = "list_instructions";

/// Counter: thousandths of the processor that the programs of other VMs had during a burst.
pub const OTHERS: &str = "others_per_mille";

/// Counter: thousandths of the processor that they had from the burst's request until the window's
/// end, which is long after its last answer.
pub const OTHERS_IN_WINDOW: &str = "others_in_window_per_mille";

/// Counter: time until the last answer to the owner who requested fewer runs, in thousandths of
/// the time until the last to the other.
pub const FEWER_RUNS: &str = "fewer_runs_per_mille";

/// Counter: least CPU time of one of them in that window, in thousandths of the greatest.
pub const LEAST_SHARE: &str = "least_share_per_mille";

/// Counter: instructions that the machine executed in that window, without those of the others.
pub const BURST_WORK: &str = "burst_work";

/// Counter: time that other work with an end took, during which a burst was requested, nanoseconds.
pub const WORK: &str = "work_ns";

/// Counter: the total of which [`BYTES`] is a part.
pub const WHOLE: &str = "whole_bytes";

/// What a pager knows of the working set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LazyMode {
    /// Nothing: every chunk is fetched on demand.
    OnDemand,
    /// The working set of an earlier restore, [`RECORDING`], is stored first; the pager has not
    /// served the image yet.
    First,
    /// The same, and the pager has served the image before and keeps the working set in memory.
    Again,
}

/// In the machine: the image for lazy restores.
pub const IMAGE: &str = "/bench/snapshot/ram.image";

/// In the machine: the recording of the first lazy restore.
pub const RECORDING: &str = "/bench/snapshot/recording";

/// Outcome of a case.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// The case's name.
    pub name: String,
    /// The VMM.
    pub monitor: String,
    /// One sample per measured run.
    pub samples: Vec<Sample>,
    /// Why there are no samples, if the case failed.
    pub failure: Option<String>,
}

impl Outcome {
    /// Outcome of a case that failed.
    pub fn failed(case: &Case, failure: String) -> Outcome {
        Outcome {
            name: case.name.clone(),
            monitor: case.monitor.clone(),
            samples: Vec::new(),
            failure: Some(failure),
        }
    }
}

/// Result of one run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// Measured time, nanoseconds of the machine's clock.
    pub nanoseconds: u64,
    /// KVM's counters, `cpu_ns`, `rss_outside_ram` (bytes), as far as available.
    pub counters: BTreeMap<String, u64>,
    /// By name: lengths, or for moments times since spawn, nanoseconds.
    pub spans: BTreeMap<String, u64>,
}
