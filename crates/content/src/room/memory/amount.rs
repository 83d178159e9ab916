//! Amounts of memory and vCPUs.

use crate::model::vm::Spec;
use jiffy_wire::vmm::PageSize;

/// What a child of a fork takes until it is ready, MiB: an idle one has 1.43 MiB of its own
/// (`clone/unique-memory` of the benchmarks).
pub(super) const CHILD_MIB: u64 = 2;

/// Memory of VMs, MiB, and their vCPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Amount {
    /// MiB that are taken until the VM is ready.
    pub soon: u64,
    /// The most MiB that it may ever take.
    pub whole: u64,
    /// Its vCPUs.
    pub cpus: u64,
}

impl Amount {
    /// The amount of a VM that boots, is restored or is woken. How much its guest will touch is
    /// not known in advance, not even for a golden or lazy one: its command may fill all of its
    /// memory at once. The VMM's own few MiB are much less than what a guest leaves untouched,
    /// and are not counted.
    pub fn of(spec: &Spec) -> Amount {
        let running = Amount::of_running(spec.memory_mib, spec.cpus);
        let soon = match spec.pages {
            // hugetlb pages are reserved when the VMM maps them and are not part of MemAvailable.
            PageSize::Huge2M | PageSize::Huge1G => 0,
            PageSize::Small => running.whole,
        };
        Amount { soon, ..running }
    }

    /// The amount of a VM that is ready.
    pub fn of_running(memory_mib: u32, cpus: u8) -> Amount {
        Amount {
            soon: 0,
            whole: memory_mib.into(),
            cpus: cpus.into(),
        }
    }

    /// The amount by which a running VM grows.
    pub fn of_growth(mib: u32) -> Amount {
        Amount {
            soon: mib.into(),
            whole: mib.into(),
            cpus: 0,
        }
    }

    /// The amount of a child of a fork, which shares its parent's memory until one of them
    /// writes.
    pub fn of_child(spec: &Spec) -> Amount {
        Amount {
            soon: CHILD_MIB,
            ..Amount::of_running(spec.memory_mib, spec.cpus)
        }
    }

    /// The amount of a VM whose RAM a pager fills completely for a capture; `bytes` of it are not
    /// zero, if that is known. Pages that are present already are counted again, so the amount is
    /// never too small.
    pub fn to_complete(spec: &Spec, bytes: Option<u64>) -> Amount {
        let most = Amount::of(spec).soon;
        let mib = bytes.map_or(most, |bytes| bytes.div_ceil(1 << 20));
        Amount {
            soon: mib.min(most),
            ..Amount::default()
        }
    }

    /// The part that is taken until the VM is ready.
    pub(super) fn until_ready(self) -> Amount {
        Amount {
            soon: self.soon,
            ..Amount::default()
        }
    }

    pub(super) fn times(self, count: u32) -> Amount {
        let count = u64::from(count);
        self.each(Amount::default(), |part, _| part.saturating_mul(count))
    }

    pub(super) fn divided(self, count: u32) -> Amount {
        let count = u64::from(count);
        self.each(Amount::default(), |part, _| part / count)
    }

    pub(super) fn plus(self, other: Amount) -> Amount {
        self.each(other, u64::saturating_add)
    }

    pub(super) fn less(self, other: Amount) -> Amount {
        self.each(other, u64::saturating_sub)
    }

    fn each(self, other: Amount, of: impl Fn(u64, u64) -> u64) -> Amount {
        Amount {
            soon: of(self.soon, other.soon),
            whole: of(self.whole, other.whole),
            cpus: of(self.cpus, other.cpus),
        }
    }
}
