//! The result of a probe of the host's KVM.

use serde::{Deserialize, Serialize};

/// Result of `jiffy-vmm probe` about the host's KVM, as JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvmProbe {
    /// The verdict.
    pub kind: KvmKind,
    /// The findings, as one sentence.
    pub detail: String,
    /// Picoseconds per iteration of the ring-0 loop.
    pub ring0_ps_per_iteration: Option<u64>,
    /// Whether `syscall` in ring 3 entered ring 0.
    pub syscall_enters_ring0: Option<bool>,
    /// Duration of the whole probe, microseconds.
    pub took_us: u64,
}

/// Kind of a host's KVM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvmKind {
    /// Guest kernel code runs on the processor.
    Real,
    /// Guest kernel code is emulated in software; ordinary guests crash.
    Emulated,
    /// There is no KVM, or it can't be opened.
    None,
}
