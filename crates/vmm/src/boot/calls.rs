//! Calls that Jiffy's kernels note while they boot (`kernel/patches/0020-init-note-calls.patch`), in
//! guest memory that is offered to them: the larger steps of `start_kernel`, and initcalls.
//!
//! The memory begins with two 32-bit numbers: its capacity, which the VMM writes, and the number of
//! records. A record has the time stamp counter and a function's address; of a call that has ended
//! the highest bit of the address is clear. All of it is the guest's, and may be anything.

use crate::layout::{BOOT_CALLS, BOOT_CALLS_SIZE};
use jiffy_devices::GuestMemory;
use vm_memory::{Bytes, GuestAddress};

const HEADER: u64 = 8;
const RECORD: usize = 16;
const CAPACITY: u32 = (BOOT_CALLS_SIZE - HEADER) as u32 / RECORD as u32;
/// Set in all addresses of a kernel, and clear in those of calls that have ended.
const HIGHEST: u64 = 1 << 63;

/// A call of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    /// Address of the function.
    pub function: u64,
    /// Time stamp counter at its start.
    pub start: u64,
    /// Time stamp counter at its end.
    pub end: u64,
}

/// Relates a guest's time stamp counter to CLOCK_MONOTONIC.
#[derive(Debug, Clone, Copy)]
pub struct TscClock {
    /// The counter at a moment.
    pub tsc: u64,
    /// That moment, nanoseconds.
    pub at_ns: u64,
    /// The counter's frequency.
    pub khz: u32,
}

impl TscClock {
    /// The time of this value of the counter, nanoseconds.
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

/// The calls that the kernel has noted and that have ended, in the order of their ends.
pub fn read(memory: &GuestMemory) -> Vec<Call> {
    let mut count = [0; 4];
    if memory
        .read_slice(&mut count, GuestAddress(BOOT_CALLS + 4))
        .is_err()
    {
        return Vec::new();
    }
    let count = u32::from_le_bytes(count).min(CAPACITY) as usize;
    let mut records = vec![0; count * RECORD];
    let at = GuestAddress(BOOT_CALLS + HEADER);
    if memory.read_slice(&mut records, at).is_err() {
        return Vec::new();
    }
    let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("8 bytes"));
    let records = records
        .chunks_exact(RECORD)
        .map(|record| (word(&record[..8]), word(&record[8..])));
    pairs(records)
}

fn pairs(records: impl Iterator<Item = (u64, u64)>) -> Vec<Call> {
    let mut open: Vec<(u64, u64)> = Vec::new();
    let mut calls = Vec::new();
    for (tsc, function) in records {
        if function & HIGHEST != 0 {
            open.push((function, tsc));
            continue;
        }
        let function = function | HIGHEST;
        let Some(at) = open.iter().rposition(|(opened, _)| *opened == function) else {
            continue;
        };
        let (_, start) = open[at];
        // Calls inside it that have not ended never will.
        open.truncate(at);
        calls.push(Call {
            function,
            start,
            end: tsc.max(start),
        });
    }
    calls
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn memory() -> GuestMemory {
        GuestMemory::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap()
    }

    /// Notes a call as the kernel does.
    fn note(memory: &GuestMemory, tsc: u64, function: u64) {
        let header = |at: u64| -> u32 { memory.read_obj(GuestAddress(BOOT_CALLS + at)).unwrap() };
        let (capacity, count) = (header(0), header(4));
        memory
            .write_obj(count + 1, GuestAddress(BOOT_CALLS + 4))
            .unwrap();
        if count < capacity {
            let at = BOOT_CALLS + HEADER + u64::from(count) * RECORD as u64;
            memory.write_obj(tsc, GuestAddress(at)).unwrap();
            memory.write_obj(function, GuestAddress(at + 8)).unwrap();
        }
    }

    #[test]
    fn calls_are_read_inside_their_callers() {
        let memory = memory();
        assert_eq!(offer(&memory), "boot.calls=0x30000");
        assert!(read(&memory).is_empty());
        let (outer, inner, lost) = (HIGHEST | 1, HIGHEST | 2, HIGHEST | 3);
        for (tsc, function) in [(10, outer), (20, inner), (30, inner & !HIGHEST)] {
            note(&memory, tsc, function);
        }
        // One that does not end, and an end without a beginning.
        note(&memory, 40, lost);
        note(&memory, 45, 9);
        note(&memory, 50, outer & !HIGHEST);
        let call = |function, start, end| Call {
            function,
            start,
            end,
        };
        assert_eq!(read(&memory), [call(inner, 20, 30), call(outer, 10, 50)]);
    }

    #[test]
    fn no_record_is_written_or_read_beyond_the_capacity() {
        let memory = memory();
        offer(&memory);
        for number in 0..2 * CAPACITY {
            let ended = if number % 2 == 0 { HIGHEST } else { 0 };
            note(&memory, number.into(), ended | 7);
        }
        assert_eq!(read(&memory).len(), CAPACITY as usize / 2);
        let after: u64 = memory
            .read_obj(GuestAddress(BOOT_CALLS + BOOT_CALLS_SIZE))
            .unwrap();
        assert_eq!(after, 0);
    }

    #[test]
    fn a_counter_is_converted_before_and_after_the_known_moment() {
        let clock = TscClock {
            tsc: 5_000_000,
            at_ns: 1000,
            khz: 2_000_000,
        };
        assert_eq!(clock.time_ns(5_000_000), 1000);
        assert_eq!(clock.time_ns(5_002_000), 2000);
        assert_eq!(clock.time_ns(4_999_000), 500);
        assert_eq!(clock.time_ns(0), 0);
        let stopped = TscClock { khz: 0, ..clock };
        assert_eq!(stopped.time_ns(u64::MAX), u64::MAX);
    }

    proptest! {
        #[test]
        fn any_memory_gives_calls_that_do_not_end_before_they_start(
            count: u32,
            records in prop::collection::vec((0..50u64, prop_oneof![0..5u64, HIGHEST..HIGHEST + 5]), 0..60),
        ) {
            let memory = memory();
            offer(&memory);
            for (tsc, function) in &records {
                note(&memory, *tsc, *function);
            }
            for call in read(&memory) {
                prop_assert!(call.start <= call.end && call.function >= HIGHEST);
            }
            memory.write_obj(count, GuestAddress(BOOT_CALLS + 4)).unwrap();
            prop_assert!(read(&memory).len() <= CAPACITY as usize / 2);
        }
    }
}
