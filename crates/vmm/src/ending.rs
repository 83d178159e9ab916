//! Why a VM ends.

use jiffy_wire::vmm::ExitReason;

/// Why a VM ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ending {
    /// The kind of reason.
    pub reason: ExitReason,
    /// The reason as one sentence.
    pub message: String,
}
