//! Options of the ledger, and the bounds that they set on a host.

use super::shortage::Bounds;
use crate::room::{Limit, MemoryLimit};
use std::num::NonZeroU64;
use std::time::Duration;

/// The default reserve: this part of the memory that VMs may use, in percent,
const SHARE: u64 = 5;
/// but at least and at most so many MiB.
const MIN_RESERVE: u64 = 128;
const MAX_RESERVE: u64 = 4096;

/// Options of the ledger.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// Limit of all VMs' memory; `None` for the host's memory less the reserve.
    pub memory: Option<MemoryLimit>,
    /// How much of that limit is promised to VMs, in percent; at least 100.
    pub overcommit: u32,
    /// Memory that VMs leave to the host; `None` for a default share.
    pub reserve: Option<Limit>,
    /// vCPUs that VMs may have for each processor of the host, in thousandths; `None` for any
    /// number.
    pub cpu_share: Option<u32>,
    /// Time limit of requests that give none.
    pub wait: Duration,
    /// Most requests in the queue.
    pub queue: usize,
}

impl Settings {
    /// The bounds on a host with `total` MiB of memory and so many processors. If the host's memory is
    /// unknown, only a limit in bytes restricts.
    pub(super) fn bounds(&self, total: Option<u64>, processors: u64) -> Bounds {
        let in_mib = |limit: Limit| limit.of(total.map_or(u64::MAX, |it| it << 20)) >> 20;
        let less_reserve = |total: u64| total.saturating_sub(self.reserve_of(total).unwrap_or(0));
        let (limit, is_chosen) = match self.memory {
            Some(MemoryLimit::Of(limit)) => (Some(in_mib(limit)), true),
            Some(MemoryLimit::Unlimited) => (None, false),
            None => (total.map(less_reserve), false),
        };
        let promised = |limit: u64| limit.saturating_mul(self.overcommit.into()) / 100;
        let cpus = |share| (processors * u64::from(share) / 1000).max(1);
        Bounds {
            memory: limit.map(promised),
            // Without a chosen limit, what the host has available bounds what VMs use.
            usable: limit
                .filter(|_| is_chosen && self.overcommit > 100)
                .and_then(NonZeroU64::new),
            cpus: self.cpu_share.map(cpus),
        }
    }

    /// The reserve in MiB, if VMs may use `total` MiB; `None` if there should be none.
    pub(super) fn reserve_of(&self, total: u64) -> Option<u64> {
        let reserve = match self.reserve {
            Some(limit) => limit.of(total << 20) >> 20,
            None => (total * SHARE / 100).clamp(MIN_RESERVE, MAX_RESERVE),
        };
        (reserve > 0).then_some(reserve)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Settings = Settings {
        memory: None,
        overcommit: 100,
        reserve: None,
        cpu_share: None,
        wait: Duration::ZERO,
        queue: 1,
    };

    #[test]
    fn the_reserve_is_a_bounded_share_or_the_configured_value() {
        let reserve = |reserve, total| Settings { reserve, ..PLAIN }.reserve_of(total);
        assert_eq!(reserve(None, 1024), Some(128));
        assert_eq!(reserve(None, 10_000), Some(500));
        assert_eq!(reserve(None, 1 << 20), Some(4096));
        assert_eq!(reserve(Some(Limit::Percent(10)), 10_000), Some(1000));
        assert_eq!(reserve(Some(Limit::Bytes(300 << 20)), 10_000), Some(300));
        assert_eq!(reserve(Some(Limit::Bytes(0)), 10_000), None);
    }

    #[test]
    fn memory_is_promised_once_unless_more_is_chosen() {
        let limit = |text: &str| Some(text.parse().unwrap());
        let promised = |settings: Settings| settings.bounds(Some(10_000), 2).memory;
        assert_eq!(promised(PLAIN), Some(9500));
        let without_reserve = Settings {
            reserve: Some(Limit::Bytes(0)),
            ..PLAIN
        };
        assert_eq!(promised(without_reserve), Some(10_000));
        for (memory, overcommit, wanted, usable) in [
            (None, 300, Some(28_500), None),
            (limit("80%"), 100, Some(8000), None),
            (limit("1G"), 300, Some(3072), Some(1024)),
            (limit("none"), 100, None, None),
        ] {
            let settings = Settings {
                memory,
                overcommit,
                ..PLAIN
            };
            assert_eq!(promised(settings), wanted);
            let bounds = settings.bounds(Some(10_000), 2);
            assert_eq!(bounds.usable.map(NonZeroU64::get), usable);
        }
        // A host whose memory is unknown refuses nothing, unless the limit does not depend on it.
        assert_eq!(PLAIN.bounds(None, 2).memory, None);
        let of_bytes = Settings {
            memory: limit("1G"),
            ..PLAIN
        };
        assert_eq!(of_bytes.bounds(None, 2).memory, Some(1024));
    }

    #[test]
    fn the_share_of_vcpus_is_of_the_hosts_processors() {
        let cpus = |cpu_share| Settings { cpu_share, ..PLAIN }.bounds(None, 4).cpus;
        assert_eq!(cpus(None), None);
        assert_eq!(cpus(Some(1500)), Some(6));
        // A VM with one vCPU is always allowed.
        assert_eq!(cpus(Some(1)), Some(1));
    }
}
