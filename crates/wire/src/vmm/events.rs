//! Events of a VMM, and its exit record.

use serde::{Deserialize, Serialize};

/// Event of a VMM, one per line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VmmEvent {
    /// A step of the VMM, in host CLOCK_MONOTONIC nanoseconds.
    Span {
        /// One of [`crate::timeline::names`].
        name: String,
        /// Start.
        start_ns: u64,
        /// End.
        end_ns: u64,
        /// A remark.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        detail: Option<String>,
    },
    /// The guest wrote `value` to the trace port.
    Mark {
        /// The byte.
        value: u8,
        /// Time, host CLOCK_MONOTONIC nanoseconds.
        at_ns: u64,
    },
    /// What a thread has done, if that was recorded ([`VmmConfig::record_activity`]); sent before
    /// `Exited`, in parts.
    ///
    /// [`VmmConfig::record_activity`]: super::VmmConfig::record_activity
    Activity(Activity),
    /// The VMM ends; the same record as in `exit.json`.
    Exited(ExitRecord),
}

/// A part of what a thread of the VMM has done, in host CLOCK_MONOTONIC nanoseconds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Activity {
    /// The thread's name.
    pub thread: String,
    /// It is a thread of the guest's kernel, and not of the VMM.
    #[serde(skip_serializing_if = "core::ops::Not::not")]
    pub kernel: bool,
    /// Names of spans and counters.
    pub names: Vec<String>,
    /// The index of its name, start and length of each span.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub spans: Vec<(u32, u64, u64)>,
    /// The index of its name, the time, and by how much the counter has grown since its last sample.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub counts: Vec<(u32, u64, u64)>,
    /// Further spans and samples, for which there was no room.
    #[serde(skip_serializing_if = "is_zero")]
    pub dropped: u64,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// How a VM ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitRecord {
    /// The kind of end.
    pub reason: ExitReason,
    /// One sentence for the user.
    pub message: String,
    /// A hint for the user, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

/// Kind of a VM's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ExitReason {
    /// The guest powered off or reset.
    Shutdown,
    /// Stopped by the control socket or SIGTERM.
    Stopped,
    /// The guest crashed (triple fault outside an orderly reset, KVM_EXIT_INTERNAL_ERROR).
    GuestFault,
    /// The VM could not be built: bad kernel, no memory, no KVM.
    StartFailed,
    /// An error in the VMM or the host while it ran.
    HostError,
}
