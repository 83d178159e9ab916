//! Timelines: named spans on one monotonic clock.

use serde::{Deserialize, Serialize};

/// Process or layer that measured a span.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Track {
    /// The command line.
    Cli,
    /// The daemon.
    Node,
    /// The virtual machine monitor.
    Vmm,
    /// The guest's kernel.
    Kernel,
    /// PID 1 and the agent.
    Init,
    /// The user's own code in the guest.
    Guest,
}

/// A named span of time; a moment if start and end are equal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// Its track.
    pub track: Track,
    /// The thread that it is of, such as `vcpu 0`, if it is not a step of the whole: part of the
    /// activity that was recorded in detail.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thread: Option<String>,
    /// Its name as shown to users, such as `vCPUs`.
    pub name: String,
    /// Start, in nanoseconds of the timeline's clock.
    pub start_ns: u64,
    /// End, in nanoseconds of the same clock; equals the start for a moment.
    pub end_ns: u64,
    /// A short remark: a size, a path, an error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
}

impl Span {
    /// A span from `start_ns` to `end_ns`; an end before the start becomes a moment.
    pub fn new(track: Track, name: impl Into<String>, start_ns: u64, end_ns: u64) -> Span {
        Span {
            track,
            thread: None,
            name: name.into(),
            start_ns,
            end_ns: end_ns.max(start_ns),
            detail: None,
        }
    }

    /// A moment.
    pub fn moment(track: Track, name: impl Into<String>, at_ns: u64) -> Span {
        Span::new(track, name, at_ns, at_ns)
    }

    /// The same span with a remark.
    pub fn with_detail(mut self, detail: impl Into<String>) -> Span {
        self.detail = Some(detail.into());
        self
    }

    /// Its length, nanoseconds.
    pub fn duration_ns(&self) -> u64 {
        self.end_ns.saturating_sub(self.start_ns)
    }
}

/// How often something happened, over time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counter {
    /// Its track.
    pub track: Track,
    /// The thread that it is of.
    pub thread: String,
    /// Its name, such as KVM's `mmio_exits`.
    pub name: String,
    /// Times, in nanoseconds of the timeline's clock, and how often it happened since the time
    /// before.
    pub points: Vec<(u64, u64)>,
}

/// All spans of one operation.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timeline {
    /// Boot id of the kernel whose CLOCK_MONOTONIC the spans use. Timelines can be merged without
    /// adjustment only if it is the same.
    pub clock: String,
    /// The spans, in no particular order.
    pub spans: Vec<Span>,
    /// Counters, if activity was recorded in detail.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub counters: Vec<Counter>,
}

impl Timeline {
    /// An empty timeline on the given clock.
    pub fn new(clock: impl Into<String>) -> Timeline {
        Timeline {
            clock: clock.into(),
            ..Timeline::default()
        }
    }

    /// The steps: the spans without those of a thread's recorded activity.
    pub fn steps(&self) -> impl Iterator<Item = &Span> {
        self.spans.iter().filter(|span| span.thread.is_none())
    }

    /// Sorts by start, longer spans first among equals.
    pub fn sort(&mut self) {
        self.spans
            .sort_by_key(|span| (span.start_ns, std::cmp::Reverse(span.end_ns), span.track));
    }

    /// The first span of that name, if any.
    pub fn find(&self, name: &str) -> Option<&Span> {
        self.spans.iter().find(|span| span.name == name)
    }

    /// Moves every span by `by_ns`, not below zero: converts a timeline from another clock.
    pub fn shift(&mut self, by_ns: i64) {
        for span in &mut self.spans {
            span.start_ns = span.start_ns.saturating_add_signed(by_ns);
            span.end_ns = span.end_ns.saturating_add_signed(by_ns);
        }
        for (at_ns, _) in self.counters.iter_mut().flat_map(|one| &mut one.points) {
            *at_ns = at_ns.saturating_add_signed(by_ns);
        }
    }
}

/// What the names of a vCPU's exits to the VMM begin with, in its recorded activity.
pub const EXIT: &str = "exit: ";

/// The thread of the guest's kernel that boots it: its calls, and probes of devices.
pub const BOOT: &str = "boot";
/// Stands for the threads of the guest's kernel, in its recorded activity.
pub const KERNEL_THREADS: &str = "kernel threads";
/// Stands for the processes of the guest, in its recorded activity.
pub const PROGRAMS: &str = "programs";

/// Names of spans. Those of a cold run are in the order in which they begin.
///
/// Tests assert this order, and the CLI's table uses it.
pub mod names {
    /// CLI: from process start until the request is sent.
    pub const CLI_START: &str = "CLI start";
    /// CLI: the machine was started for this command.
    pub const MACHINE_START: &str = "machine start";
    /// Node: the request arrived (moment).
    pub const REQUEST_RECEIVED: &str = "request received";
    /// Node: the VM waited for memory or vCPUs.
    pub const ROOM_WAITED: &str = "room waited for";
    /// Node: image, kernel and disks looked up and opened.
    pub const IMAGE_READY: &str = "image ready";
    /// Node: the VM's address was reserved, and its published ports were bound.
    pub const ADDRESS_TAKEN: &str = "address taken";
    /// Node: the VM's link was created.
    pub const LINK_MADE: &str = "link made";
    /// Node: the rules of the VM's network policy were created.
    pub const RULES_MADE: &str = "rules made";
    /// Node: the name server knew the VM.
    pub const NAME_KNOWN: &str = "name known";
    /// Node: from the spawn of `jiffy-vmm` to the first instruction of its main.
    pub const VMM_SPAWNED: &str = "VMM spawned";
    /// Node: a standby was given its configuration.
    pub const STANDBY_TAKEN: &str = "standby taken";
    /// VMM: `KVM_CREATE_VM` and the interrupt controllers.
    pub const KVM_VM_CREATED: &str = "KVM VM created";
    /// VMM: guest memory created and registered.
    pub const MEMORY: &str = "memory";
    /// VMM: vCPUs created and configured.
    pub const VCPUS: &str = "vCPUs";
    /// VMM: devices built.
    pub const DEVICES: &str = "devices";
    /// VMM: kernel, initrd and boot structures written to guest memory.
    pub const KERNEL_LOADED: &str = "kernel loaded";
    /// VMM: the first vCPU entered the guest (moment).
    pub const FIRST_KVM_RUN: &str = "first KVM_RUN";
    /// Kernel: its entry point (moment).
    pub const KERNEL_ENTRY: &str = "kernel entry";
    /// Kernel: from its entry to PID 1.
    pub const KERNEL_BOOT: &str = "kernel";
    /// Init: first instructions of PID 1 (moment).
    pub const PID1: &str = "PID 1";
    /// Init: the agent accepts requests (moment).
    pub const AGENT_READY: &str = "agent ready";
    /// Init: the command runs (moment).
    pub const COMMAND_STARTED: &str = "command started";
    /// Guest: the command, from start to end.
    pub const COMMAND: &str = "command";
    /// Init: the command has ended (moment).
    pub const COMMAND_DONE: &str = "command done";
    /// VMM: the state of a captured VM was read and checked.
    pub const STATE_LOADED: &str = "state loaded";
    /// VMM: the saved RAM was mapped or passed to the pager.
    pub const MEMORY_ATTACHED: &str = "memory attached";
    /// VMM: the restored vCPUs are resumed (moment).
    pub const VCPUS_RESUMED: &str = "vCPUs resumed";
    /// Pager: the first fault of a restored guest (moment).
    pub const FIRST_FAULT: &str = "first fault";
    /// Pager: begins with the first fault and lasts as long as all faults together.
    pub const FAULTS: &str = "faults";
    /// VMM: the guest read a part of a disk that is not available, and got an error (moment; the
    /// remark names disk, chunk and reason).
    pub const CHUNK_UNAVAILABLE: &str = "disk.chunk_unavailable";
    /// Guest: it has noticed that it was restored (moment).
    pub const GATE_ENTERED: &str = "gate entered";
    /// Guest: it has taken on its new generation, and its programs are thawed (moment).
    pub const GATE_ACKNOWLEDGED: &str = "gate acknowledged";
    /// Node: the guest's programs are frozen and its disks are written back.
    pub const QUIESCE: &str = "quiesce";
    /// Node: from the capture request to the VMM until its answer.
    pub const CAPTURE: &str = "capture";
    /// VMM: the vCPUs were paused.
    pub const PAUSE: &str = "pause";
    /// Node: writable volumes cloned.
    pub const VOLUMES_CLONED: &str = "volumes cloned";
    /// Node: the balloon took memory that the guest could spare.
    pub const BALLOON: &str = "balloon";
    /// Node: RAM written to its file.
    pub const IMAGE_WRITTEN: &str = "image written";
    /// Node: the snapshot was synced and renamed.
    pub const SNAPSHOT_NAMED: &str = "snapshot named";
    /// Node: all children of a fork are spawned.
    pub const CHILDREN_SPAWNED: &str = "children spawned";
    /// Node: all children of a fork are ready.
    pub const CHILDREN_READY: &str = "children ready";
    /// VMM: a thread has done more than was recorded (moment).
    pub const ACTIVITY_CUT: &str = "not recorded";
    /// CLI: the user has the last byte of output and the exit status (moment).
    pub const ANSWER_DELIVERED: &str = "answer delivered";
}
