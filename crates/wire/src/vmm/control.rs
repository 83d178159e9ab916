//! Commands to a VMM, and its answers.

use super::disk::DiskLimit;
use super::net::NetLimit;
use super::restore::Extent;
use crate::cpu::Profile;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// A command on the control socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ControlRequest {
    /// Whether the VM runs. Answered with `Status`.
    Status,
    /// Stop all vCPUs; they keep their state.
    Pause,
    /// Resume the vCPUs.
    Resume,
    /// Begin a VM that is held ([`Restore::hold`](super::Restore::hold)). The VMM reads its configuration again, from the
    /// file with which it was started, and takes fw_cfg files, limits of devices and generation from
    /// it; all else stays. If the VM is paused as well, it enters the guest when it is resumed.
    Begin,
    /// End the VM at once. Answered before it ends.
    Stop,
    /// KVM's counters. Answered with `Stats`.
    Stats,
    /// Pause, save the state, freeze RAM. Answered with `Captured`, which carries descriptors of
    /// the state, the layout and the layers of RAM. Their contents never change, whatever the VM
    /// does later.
    Capture {
        /// Resume the VM afterwards; otherwise it stays paused.
        resume: bool,
    },
    /// Pages that the VM has written since the last capture or its restore. Answered with
    /// `Written`.
    Written,
    /// The guest's processor at the last capture. Answered with `CpuProfile`.
    CpuProfile,
    /// The guest's reads of the first disk whose reads are recorded. Answered with `Reads`.
    Reads,
    /// Set the memory that the guest should give back. Answered with `Balloon`.
    SetBalloon {
        /// Target size of the balloon, MiB.
        target_mib: u32,
    },
    /// Size of the balloon, and the guest's statistics. Answered with `Balloon`.
    Balloon,
    /// Set how much of its RAM the guest may use: the target of the second balloon. Answered with
    /// `Memory`.
    SetMemory {
        /// MiB.
        usable_mib: u32,
    },
    /// How much of its RAM the guest may use. Answered with `Memory`.
    Memory,
    /// Replace the limits of all disks and network interfaces, each in the order of the
    /// configuration. Requests that wait for a previous limit are checked against the new one.
    SetLimits {
        /// Of each disk.
        disks: Vec<DiskLimit>,
        /// Of each network interface, in each direction.
        nets: Vec<NetLimit>,
    },
    /// After the answer `Ok` this connection is the channel on which the VMM asks for connections to
    /// this socket of its configuration (`jiffy_sys::dial`), in place of an earlier one. A VMM that
    /// connects by name answers with `Error`.
    Dial {
        /// The socket, as the VMM's configuration names it.
        socket: PathBuf,
    },
}

/// Answer on the control socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ControlResponse {
    /// Done.
    Ok,
    /// State of the vCPUs.
    Status {
        /// The VM's id.
        id: String,
        /// The VMM's process id.
        pid: u32,
        /// True while paused.
        paused: bool,
    },
    /// Counters by KVM's names (`exits`, `io_exits`, `mmio_exits`, `halt_exits`, …), summed over
    /// vCPUs. For each network interface `net0_received_frames`, `net0_received_bytes`,
    /// `net0_received_dropped`, the same with `sent` for what the guest sent, and
    /// `net0_sent_spoofed`, and `net0_sent_refused` for what its guard refused.
    Stats(std::collections::BTreeMap<String, u64>),
    /// The VM was captured. Attached by `SCM_RIGHTS`: the state, the layout (JSON), then `layers`
    /// files.
    Captured {
        /// Number of layers of RAM.
        layers: u32,
        /// Pause of the vCPUs (until now, if they are still paused), nanoseconds.
        pause_ns: u64,
        /// Bytes copied because they were written since the last capture.
        copied_bytes: u64,
    },
    /// Ranges of RAM, sorted.
    Written(Vec<Extent>),
    /// The guest's processor.
    CpuProfile(Box<Profile>),
    /// Ranges of a disk.
    Reads(ReadUnits),
    /// The balloon.
    Balloon(BalloonStatus),
    /// The second balloon.
    Memory(MemoryStatus),
    /// It failed, for this reason.
    Error(String),
}

/// Ranges of a disk that were read.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadUnits {
    /// Size of a unit, bytes.
    pub unit: u32,
    /// First unit and number of units of each range, in the order of the first read.
    pub rows: Vec<(u32, u32)>,
}

/// What a guest may use of its RAM, and what it has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryStatus {
    /// MiB that it may use.
    pub usable_mib: u32,
    /// MiB that it has not given back, or has taken back. Counted are pages that the VMM released.
    pub used_mib: u32,
}

/// The balloon, and the guest's memory statistics.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BalloonStatus {
    /// Target size, MiB.
    pub target_mib: u32,
    /// Current size, MiB.
    pub actual_mib: u32,
    /// Bytes returned by free page reporting so far.
    pub reported_bytes: u64,
    /// The guest's statistics by name (Virtio 1.3 §5.5.6.4), bytes or counts.
    pub stats: std::collections::BTreeMap<String, u64>,
}
