//! What the probe runs, and its results, as JSON.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// A case: what to measure, and how often.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Case {
    /// `boot/same-kernel/pid1` and the like.
    pub name: String,
    /// Whose: `jiffy`, `firecracker`, …
    pub monitor: String,
    /// How to measure.
    pub kind: Kind,
    /// Runs counted.
    pub runs: u32,
    /// Runs before those, which are discarded.
    pub warm_up: u32,
}

impl fmt::Display for Case {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} {}", self.name, self.monitor)
    }
}

/// How to measure a case. In each argument `{run}` becomes the run's number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// From spawn to the byte [`MARKER`] on its stdout; then it is killed.
    ToMarker {
        /// Program and arguments; `{events}` becomes the number of an
        /// inherited descriptor on which it may tell its own spans.
        argv: Vec<String>,
        /// Guest RAM in MiB, to tell it from the monitor's own memory.
        ram_mib: u64,
    },
    /// A VM is booted once and captured into a file; then, from the spawn of a
    /// monitor that restores it to the next byte on its stdout.
    Restore {
        /// How it is booted: a file with a `VmmConfig` that has a control
        /// socket. Its guest writes [`MARKER`] again and again.
        config: String,
        /// Not from a spawn to a byte, but from when a spare monitor, which
        /// was there before, is told what it is until its vCPUs go on.
        spare: bool,
    },
    /// The same with the captured RAM in a compressed image, [`IMAGE`], that a
    /// pager serves.
    Lazy {
        /// As for `Restore`.
        config: String,
        /// What is known of what it needs.
        how: Lazily,
    },
    /// Firecracker boots a VM and makes a snapshot of it; then, from the spawn
    /// of another that restores it to the next byte on its stdout.
    FirecrackerRestore {
        /// The program.
        program: String,
        /// Kernel, and an initramfs whose guest writes [`MARKER`] again and
        /// again.
        kernel: String,
        /// That initramfs.
        initramfs: String,
        /// Kernel parameters.
        command_line: String,
        /// Guest RAM in MiB.
        ram_mib: u64,
    },
    /// An idle VM of the node is captured: the counter [`BYTES`], on disk.
    SnapshotBytes,
    /// An idle VM of the node is forked: the counter [`BYTES`], memory that
    /// only the child's monitor has mapped once it idles.
    CloneMemory,
    /// A VM of the node that does nothing, watched: the counters [`INSTRUCTIONS`]
    /// and [`WAKE_UPS`].
    Idle,
    /// An idle VM of the node is forked into many, which then answer: the counter
    /// [`BYTES`], memory of the host that went with each of them, all told.
    Clones {
        /// How many.
        count: u32,
    },
    /// Many at the same moment, each from spawn to its first byte of output:
    /// one sample each.
    AtOnce {
        /// How many.
        count: u32,
        /// Program and arguments, with `--name` and a VM's name in which
        /// `{run}` becomes a number of its own.
        argv: Vec<String>,
        /// Run again and again before each run but the first, until it
        /// succeeds.
        once: Vec<String>,
        /// Run afterwards for each, to clean up.
        after: Vec<String>,
    },
    /// A VM is booted once; then, from the request to capture it to the moment
    /// the vCPUs of a child go on, whose monitor was a spare. The parent's pause is the span `pause`.
    Fork {
        /// As for `Restore`.
        config: String,
    },
    /// A VM is booted and captured whole, each time anew: how long it stood
    /// still.
    Pause {
        /// As for `Restore`.
        config: String,
    },
    /// From the first [`MARKER`] on its stdout to the second, between which its
    /// guest reads its disk.
    Disk {
        /// Program and arguments.
        argv: Vec<String>,
        /// The file is in the page cache.
        warm: bool,
    },
    /// The layer of a root disk is made, as the node does it.
    CreateRoot {
        /// Its size in bytes.
        bytes: u64,
    },
    /// An ext4 image on an XFS becomes a VM's root disk by a clone, as the node does
    /// it.
    CloneRoot {
        /// Its size in bytes.
        bytes: u64,
    },
    /// A shell command of an image that a registry has, begun on a node that
    /// has nothing of it: the counter [`BYTES`], moved over loopback until the
    /// first byte of its answer.
    FirstAnswer {
        /// The image.
        reference: String,
        /// Bytes of it in the registry: the counter [`WHOLE`].
        bytes: u64,
    },
    /// From spawn to exit with status 0.
    ToExit {
        /// An image that is pulled before the first.
        pull: Option<String>,
        /// Run again and again before each until it succeeds.
        once: Option<Vec<String>>,
        /// Run before each; what it starts is given the time to come to rest.
        before: Option<Vec<String>>,
        /// Program and arguments.
        argv: Vec<String>,
        /// Run after it; prints a timeline as JSON.
        timeline: Option<Vec<String>>,
        /// Run after that, to clean up.
        after: Option<Vec<String>>,
    },
}

impl Kind {
    /// Whether its first run captures a VM, of which the others are made.
    pub fn is_of_a_capture(&self) -> bool {
        matches!(
            self,
            Kind::Restore { .. }
                | Kind::Lazy { .. }
                | Kind::FirecrackerRestore { .. }
                | Kind::Fork { .. }
        )
    }
}

/// The byte PID 1 of the benchmark's initramfs writes to COM1.
pub const MARKER: u8 = b'J';

/// The byte with which a guest that measures begins to say what went wrong; a
/// line follows.
pub const FAILURE: u8 = b'!';

/// Vsock's socket of a VMM without a node.
pub const VSOCK: &str = "/tmp/bench-vsock.sock";

/// The counter of cases that measure no time.
pub const BYTES: &str = "bytes";

/// The counter of instructions a second.
pub const INSTRUCTIONS: &str = "instructions_per_second";

/// The counter of wake-ups in a thousand seconds.
pub const WAKE_UPS: &str = "wake_ups_per_thousand_seconds";

/// The counter of what [`BYTES`] are a part of.
pub const WHOLE: &str = "whole_bytes";

/// What a pager knows of the working set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lazily {
    /// Nothing: every chunk is fetched on demand.
    OnDemand,
    /// What an earlier restore touched, [`RECORDING`], is stored first; this
    /// pager has not served the image before.
    First,
    /// The same, and it has: it has that much in memory.
    Again,
}

/// In the machine, the image that lazy restores are served from.
pub const IMAGE: &str = "/bench/snapshot/ram.image";

/// In the machine, what the first of them touched.
pub const RECORDING: &str = "/bench/snapshot/recording";

/// Results of a case.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// The case's name.
    pub name: String,
    /// Whose.
    pub monitor: String,
    /// One a counted run.
    pub samples: Vec<Sample>,
    /// Why there are none, if the case failed.
    pub failure: Option<String>,
}

impl Outcome {
    /// Of a case that could not be measured.
    pub fn failed(case: &Case, failure: String) -> Outcome {
        Outcome {
            name: case.name.clone(),
            monitor: case.monitor.clone(),
            samples: Vec::new(),
            failure: Some(failure),
        }
    }
}

/// One run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// Spawn to the end that is measured, nanoseconds of the machine's clock.
    pub nanoseconds: u64,
    /// KVM's counters, `cpu_ns`, `rss_outside_ram` (bytes), as far as known.
    pub counters: BTreeMap<String, u64>,
    /// Lengths (or, for moments, times since spawn) by name, nanoseconds.
    pub spans: BTreeMap<String, u64>,
}
