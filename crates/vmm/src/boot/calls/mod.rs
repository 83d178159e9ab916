//! What Jiffy's kernels note (`kernel/patches/0020-init-note-calls.patch`) in guest memory that is
//! offered to them: the larger steps of `start_kernel`, initcalls, probes of drivers, threads of the
//! kernel, and the starts and ends of programs.
//!
//! The memory begins with two 32-bit numbers: its capacity, which the VMM writes, and the number of
//! records, also of those for which there was no room. All of it is the guest's, and may be anything.
//!
//! * [`record`]: the records.
//! * [`processes`]: programs and threads, out of records.

mod processes;
mod record;
#[cfg(test)]
mod tests;

use crate::events::KernelSpan;
use crate::layout::{BOOT_CALLS, BOOT_CALLS_SIZE};
use jiffy_devices::GuestMemory;
use jiffy_wire::timeline::{BOOT, KERNEL_THREADS, PROGRAMS};
use processes::Processes;
use record::{RECORD, Record};
use std::collections::{BTreeMap, BTreeSet};
use vm_memory::{Bytes, GuestAddress};

const HEADER: u64 = 8;
const CAPACITY: u32 = (BOOT_CALLS_SIZE - HEADER) as u32 / RECORD as u32;

/// Something that took time, in values of the time stamp counter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Noted {
    /// What it was.
    pub what: What,
    /// Its start.
    pub start: u64,
    /// Its end, not before the start, or the last moment of which there is a record; `None` if it
    /// had not ended.
    pub end: Option<u64>,
}

/// What took time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum What {
    /// The call of a function at this address.
    Call(u64),
    /// The probe of a device by a driver.
    Probe(String),
    /// A thread of the kernel.
    KernelThread(String),
    /// A program, from its start to its end or to the next one in its process.
    Program(String),
}

/// All that the kernel has noted.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Notes {
    /// Calls, then probes, in the order of their ends; then programs and threads.
    pub noted: Vec<Noted>,
    /// Further records, for which there was no room.
    pub dropped: u32,
}

impl Notes {
    /// Addresses of the functions that were called.
    pub fn functions(&self) -> BTreeSet<u64> {
        let functions = self.noted.iter().filter_map(|one| match one.what {
            What::Call(function) => Some(function),
            _ => None,
        });
        functions.collect()
    }

    /// What was noted, with the functions' names, until the VM ended.
    pub fn spans(
        &self,
        names: &BTreeMap<u64, String>,
        clock: &TscClock,
        ended_ns: u64,
    ) -> Vec<KernelSpan> {
        let span = |one: &Noted| {
            let (thread, name) = match &one.what {
                What::Call(function) => {
                    let name = names.get(function).cloned();
                    (BOOT, name.unwrap_or_else(|| format!("{function:#x}")))
                }
                What::Probe(name) => (BOOT, name.clone()),
                What::KernelThread(name) => (KERNEL_THREADS, name.clone()),
                What::Program(name) => (PROGRAMS, name.clone()),
            };
            let start_ns = clock.time_ns(one.start);
            let end_ns = one.end.map_or(ended_ns, |end| clock.time_ns(end));
            KernelSpan {
                thread,
                name,
                start_ns,
                length_ns: end_ns.saturating_sub(start_ns),
            }
        };
        self.noted.iter().map(span).collect()
    }
}

/// Relates a guest's time stamp counter to CLOCK_MONOTONIC.
#[derive(Debug, Clone, Copy)]
pub struct TscClock {
    /// The counter at a moment.
    pub tsc: u64,
    /// That moment, nanoseconds of CLOCK_MONOTONIC.
    pub at_ns: u64,
    /// The counter's frequency, kHz.
    pub khz: u32,
}

impl TscClock {
    /// The time of this value of the counter, nanoseconds of CLOCK_MONOTONIC.
    pub fn time_ns(&self, tsc: u64) -> u64 {
        let after = i128::from(tsc) - i128::from(self.tsc);
        let after_ns = after * 1_000_000 / i128::from(self.khz.max(1));
        let time_ns = (i128::from(self.at_ns) + after_ns).max(0);
        u64::try_from(time_ns).unwrap_or(u64::MAX)
    }
}

/// Offers the memory; the parameter with which the kernel finds it.
pub fn offer(memory: &GuestMemory) -> String {
    memory
        .write_slice(&CAPACITY.to_le_bytes(), GuestAddress(BOOT_CALLS))
        .expect("low memory is RAM in every guest");
    format!("boot.calls={BOOT_CALLS:#x}")
}

/// What the kernel has noted.
pub fn read(memory: &GuestMemory) -> Notes {
    let mut count = [0; 4];
    if memory
        .read_slice(&mut count, GuestAddress(BOOT_CALLS + 4))
        .is_err()
    {
        return Notes::default();
    }
    let count = u32::from_le_bytes(count);
    let mut bytes = vec![0; count.min(CAPACITY) as usize * RECORD];
    let at = GuestAddress(BOOT_CALLS + HEADER);
    if memory.read_slice(&mut bytes, at).is_err() {
        return Notes::default();
    }
    let records = record::decode(&bytes);
    // An event of several records did not fit into the last ones, which are empty then.
    let empty = match count > CAPACITY {
        true => record::empty_at_end(&bytes),
        false => 0,
    };
    let dropped = count.saturating_sub(CAPACITY).saturating_add(empty);
    // Ends after the last record are not known.
    let known_until = match dropped {
        0 => None,
        _ => records.iter().map(|(tsc, _)| *tsc).max(),
    };
    let mut noted = calls(&records);
    noted.extend(probes(&records));
    noted.extend(Processes::of(&records, known_until));
    Notes { noted, dropped }
}

/// The calls that have ended.
fn calls(records: &[(u64, Record)]) -> Vec<Noted> {
    let mut open: Vec<(u64, u64)> = Vec::new();
    let mut calls = Vec::new();
    for (tsc, record) in records {
        match record {
            Record::Call(function) => open.push((*function, *tsc)),
            Record::CallEnd(function) => {
                let Some(at) = open.iter().rposition(|(opened, _)| opened == function) else {
                    continue;
                };
                let (_, start) = open[at];
                // Calls inside it that have not ended never will.
                open.truncate(at);
                calls.push(noted(What::Call(*function), start, *tsc));
            }
            _ => {}
        }
    }
    calls
}

/// The probes that have ended: those of one thread nest.
fn probes(records: &[(u64, Record)]) -> Vec<Noted> {
    let mut open: Vec<(u32, &str, u64)> = Vec::new();
    let mut probes = Vec::new();
    for (tsc, record) in records {
        match record {
            Record::Probe { pid, name } => open.push((*pid, name, *tsc)),
            Record::ProbeEnd { pid, error } => {
                let Some(at) = open.iter().rposition(|(opened, ..)| opened == pid) else {
                    continue;
                };
                let (_, name, start) = open.remove(at);
                let name = match error {
                    0 => format!("probe: {name}"),
                    _ => format!("probe: {name}, error {error}"),
                };
                probes.push(noted(What::Probe(name), start, *tsc));
            }
            _ => {}
        }
    }
    probes
}

fn noted(what: What, start: u64, end: u64) -> Noted {
    Noted {
        what,
        start,
        end: Some(end.max(start)),
    }
}
