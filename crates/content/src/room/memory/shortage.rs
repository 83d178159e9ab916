//! Compares a request with the available resources, and makes the error message.

use super::amount::Amount;
use crate::error::Error;
use std::fs;
use std::io;
use std::num::NonZeroU64;
use std::time::Duration;

/// The host's memory.
#[derive(Debug, Clone, Copy)]
pub struct Memory {
    /// MemTotal, MiB.
    pub total: u64,
    /// MemAvailable, MiB.
    pub available: u64,
}

impl Memory {
    /// The memory of VMs that may use `limit` MiB in all, and use `in_use`.
    pub(super) fn within(self, limit: u64, in_use: u64) -> Memory {
        Memory {
            total: self.total.min(limit),
            available: self.available.min(limit.saturating_sub(in_use)),
        }
    }
}

/// What the first request in the queue lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lacking {
    /// MiB of the host's memory.
    Memory(u64),
    /// Memory or vCPUs within the limits of all VMs.
    Share,
}

/// The most that VMs may have in all.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Bounds {
    /// MiB that may be promised.
    pub(super) memory: Option<u64>,
    /// MiB that may be used, if more is promised.
    pub(super) usable: Option<NonZeroU64>,
    /// vCPUs.
    pub(super) cpus: Option<u64>,
}

/// A request, compared with what is reserved and what the host has.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shortage {
    pub(super) want: Amount,
    /// VMs that want it.
    pub(super) count: u32,
    pub(super) held: Amount,
    pub(super) bounds: Bounds,
    pub(super) memory: Option<Memory>,
}

/// Which bound a request exceeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lack {
    /// The host's memory.
    Memory,
    /// The limit of all VMs' memory.
    Limit,
    /// The limit of all VMs' vCPUs.
    Cpus,
}

impl Shortage {
    /// Whether there is enough.
    pub(super) fn fits(&self) -> bool {
        self.fits_with(Amount::default())
    }

    /// As [`Shortage::fits`] if `more` were held in addition.
    pub(super) fn fits_with(&self, more: Amount) -> bool {
        self.lacks_with(more).is_none()
    }

    /// What is missing; `None` if it fits.
    pub(super) fn lacking(&self) -> Option<Lacking> {
        let missing = |memory: Memory| {
            let all = self.held.plus(self.want);
            all.soon.saturating_sub(memory.available)
        };
        self.lacks_with(Amount::default()).map(|lack| match lack {
            Lack::Memory => Lacking::Memory(self.memory.map_or(0, missing)),
            Lack::Limit | Lack::Cpus => Lacking::Share,
        })
    }

    fn lacks_with(&self, more: Amount) -> Option<Lack> {
        let all = self.held.plus(more).plus(self.want);
        let Bounds { memory, cpus, .. } = self.bounds;
        // Adopted VMs may already hold more than a bound.
        if self.want.whole > 0 && memory.is_some_and(|limit| all.whole > limit) {
            return Some(Lack::Limit);
        }
        if self.want.cpus > 0 && cpus.is_some_and(|limit| all.cpus > limit) {
            return Some(Lack::Cpus);
        }
        let over = |memory: Memory| all.soon > memory.available;
        (self.want.soon > 0 && self.memory.is_some_and(over)).then_some(Lack::Memory)
    }

    /// Whether it would not fit now even if all VMs ended. Other programs may free memory later.
    pub(super) fn is_permanent(&self) -> bool {
        let beyond = |memory: Memory| {
            let most = memory.available.saturating_add(self.held.whole);
            self.want.soon > most
        };
        self.is_beyond_bounds() || self.memory.is_some_and(beyond)
    }

    /// Whether it is more than VMs may ever have, or than the host's whole memory.
    pub(super) fn is_beyond_bounds(&self) -> bool {
        let Bounds { memory, cpus, .. } = self.bounds;
        memory.is_some_and(|limit| self.want.whole > limit)
            || cpus.is_some_and(|limit| self.want.cpus > limit)
            || self
                .memory
                .is_some_and(|memory| self.want.soon > memory.total)
    }

    /// The error, with the time that the request waited, if any.
    pub(super) fn error(&self, waited: Option<Duration>) -> Error {
        let lack = self.lacks_with(Amount::default());
        let needs = match lack {
            Some(Lack::Limit) => format!("{} MiB of memory", self.want.whole),
            Some(Lack::Cpus) => vcpus(self.want.cpus),
            Some(Lack::Memory) => format!("{} MiB of memory", self.want.soon),
            None => format!("{} MiB of memory", self.want.soon.max(self.want.whole)),
        };
        let who = match self.count {
            1 => format!("The VM wants {needs}"),
            count => format!("{count} VMs want {needs}"),
        };
        let waited = match (waited, lack) {
            (Some(waited), Some(Lack::Cpus)) => {
                format!(" and waited {} s for them", waited.as_secs())
            }
            (Some(waited), _) => format!(" and waited {} s for it", waited.as_secs()),
            (None, _) => String::new(),
        };
        let has = match (lack, self.memory, self.bounds) {
            (
                Some(Lack::Limit),
                _,
                Bounds {
                    memory: Some(limit),
                    ..
                },
            ) => format!(
                "VMs have {} MiB of the {limit} MiB that they may have in all",
                self.held.whole
            ),
            (
                Some(Lack::Cpus),
                _,
                Bounds {
                    cpus: Some(limit), ..
                },
            ) => format!(
                "VMs have {} of the {} that they may have in all",
                self.held.cpus,
                vcpus(limit)
            ),
            (Some(Lack::Memory), Some(memory), _) => {
                let starting = match self.held.soon {
                    0 => String::new(),
                    soon => format!(", of which VMs that are starting will take {soon} MiB"),
                };
                let available = memory.available;
                match self.bounds.usable {
                    Some(limit) => format!(
                        "{available} MiB of the {limit} MiB that VMs may use are available{starting}"
                    ),
                    None => format!("the host has {available} MiB available{starting}"),
                }
            }
            _ => "requests that are served before this one still wait".to_owned(),
        };
        let fewer = match (self.count, lack) {
            (1, Some(Lack::Cpus)) => "give this one fewer with --cpus",
            (1, _) => "give this one less with --memory",
            _ => "start fewer VMs",
        };
        let higher = match lack {
            Some(Lack::Limit) => {
                ", or start jiffyd with a higher --memory-limit or --memory-overcommit"
            }
            Some(Lack::Cpus) => ", or start jiffyd with a higher --cpu-share",
            Some(Lack::Memory) | None => "",
        };
        Error::no_room(format!("{who}{waited}; {has}."))
            .hint(format!("Stop other VMs, or {fewer}{higher}."))
    }
}

/// A number of vCPUs in words: `1 vCPU`, `2 vCPUs`.
pub fn vcpus(count: u64) -> String {
    match count {
        1 => "1 vCPU".to_owned(),
        count => format!("{count} vCPUs"),
    }
}

/// The host's memory.
pub(super) fn meminfo() -> io::Result<Memory> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let field = |name: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix(name))
            .and_then(|rest| rest.trim().strip_suffix(" kB"))
            .and_then(|kib| kib.trim().parse::<u64>().ok())
            .map(|kib| kib / 1024)
            .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
    };
    Ok(Memory {
        total: field("MemTotal:")?,
        available: field("MemAvailable:")?,
    })
}
