//! The guest's memory statistics (Virtio 1.3 §5.5.6.3).

use jiffy_sys::mutex::{lock, unpoisoned};
use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

/// Bytes of one entry: a tag of two, a value of eight.
const ENTRY_BYTES: usize = 10;

/// Names by tag. Faults, allocations and scans are counted since the guest booted; the others are
/// bytes. Linux has the last six since 6.12.
const NAMES: [&str; 16] = [
    "swap_in",
    "swap_out",
    "major_faults",
    "minor_faults",
    "free_memory",
    "total_memory",
    "available_memory",
    "disk_caches",
    "hugetlb_allocations",
    "hugetlb_failures",
    "oom_kill",
    "alloc_stall",
    "async_scan",
    "direct_scan",
    "async_reclaim",
    "direct_reclaim",
];

/// One set of statistics.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Statistics {
    /// The number of this set, from 1; 0 if none has come.
    pub sequence: u64,
    values: [Option<u64>; NAMES.len()],
}

impl Statistics {
    /// The statistics that the guest gave, by name: bytes, or counts.
    pub fn by_name(&self) -> BTreeMap<&'static str, u64> {
        let named = NAMES.into_iter().zip(self.values);
        named
            .filter_map(|(name, value)| Some((name, value?)))
            .collect()
    }

    /// One value by its name.
    pub fn get(&self, name: &str) -> Option<u64> {
        let tag = NAMES.iter().position(|known| *known == name)?;
        self.values[tag]
    }
}

/// Holds the guest's last statistics. A thread that requested new ones can wait for them here
/// without locking the device.
#[derive(Debug, Default)]
pub struct StatisticsBoard {
    latest: Mutex<Statistics>,
    arrived: Condvar,
}

impl StatisticsBoard {
    /// The last set.
    pub fn latest(&self) -> Statistics {
        self.lock().clone()
    }

    /// Waits for a set after `sequence`, at most for `timeout`; returns the last set.
    pub fn newer_than(&self, sequence: u64, timeout: Duration) -> Statistics {
        let waited = self
            .arrived
            .wait_timeout_while(self.lock(), timeout, |latest| latest.sequence <= sequence);
        let (latest, _) = unpoisoned(waited);
        latest.clone()
    }

    /// Takes entries as the guest wrote them. Unknown tags are skipped; of two entries with one tag
    /// the last counts.
    pub(super) fn put(&self, entries: &[u8]) {
        let mut values = [None; NAMES.len()];
        for entry in entries.chunks_exact(ENTRY_BYTES) {
            let [a, b, value @ ..] = entry else { continue };
            let tag = usize::from(u16::from_le_bytes([*a, *b]));
            if let (Some(slot), Ok(value)) = (values.get_mut(tag), value.try_into()) {
                *slot = Some(u64::from_le_bytes(value));
            }
        }
        let mut latest = self.lock();
        latest.sequence += 1;
        latest.values = values;
        drop(latest);
        self.arrived.notify_all();
    }

    /// Discards the statistics, because their driver is gone.
    pub(super) fn clear(&self) {
        self.lock().values = Default::default();
    }

    fn lock(&self) -> MutexGuard<'_, Statistics> {
        lock(&self.latest)
    }
}
