//! Why a VM ends.

use jiffy_wire::vmm::ExitReason;

/// Why a VM can't go on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ending {
    /// What kind.
    pub reason: ExitReason,
    /// One sentence.
    pub message: String,
}
