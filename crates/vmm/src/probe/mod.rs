//! What kind of KVM this host has.

use jiffy_wire::vmm::{KvmKind, KvmProbe};

/// Looks.
pub fn probe() -> KvmProbe {
    KvmProbe {
        kind: KvmKind::None,
        detail: String::new(),
        ring0_ps_per_iteration: None,
        syscall_enters_ring0: None,
        took_us: 0,
    }
}
