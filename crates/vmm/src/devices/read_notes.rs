//! Notes which parts of a disk a guest reads, in order, to find out what a boot needs. It costs a
//! bitmap lookup per read, and is done only for disks whose configuration asks for it.

use jiffy_devices::virtio::block::{Fetcher, Residency};
use jiffy_sys::mutex::lock;
use jiffy_wire::vmm::ReadUnits;
use std::collections::HashSet;
use std::ops::Range;
use std::sync::Mutex;

/// Bytes of a unit: a chunk of a root file system's image.
const UNIT: u64 = 16 << 10;
/// Most units that are noted, 256 MiB: a boot reads less.
const UNITS_MAX: usize = 16 << 10;

/// The units of a disk that were read, in order.
#[derive(Debug, Default)]
pub struct ReadNotes(Mutex<Noted>);

#[derive(Debug, Default)]
struct Noted {
    seen: HashSet<u32>,
    /// First unit and count of each run.
    rows: Vec<(u32, u32)>,
}

impl ReadNotes {
    /// The units noted so far.
    pub fn units(&self) -> ReadUnits {
        let noted = lock(&self.0);
        ReadUnits {
            unit: UNIT as u32,
            rows: noted.rows.clone(),
        }
    }
}

impl Residency for ReadNotes {
    /// All of the file is present.
    fn is_present(&self, bytes: &Range<u64>) -> bool {
        let mut noted = lock(&self.0);
        for unit in bytes.start / UNIT..bytes.end.div_ceil(UNIT) {
            let Ok(unit) = u32::try_from(unit) else { break };
            if noted.seen.len() >= UNITS_MAX || !noted.seen.insert(unit) {
                continue;
            }
            match noted.rows.last_mut() {
                Some((first, count)) if first.checked_add(*count) == Some(unit) => *count += 1,
                _ => noted.rows.push((unit, 1)),
            }
        }
        true
    }

    fn fetcher(&self) -> Option<&dyn Fetcher> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_in_the_order_of_their_first_read() {
        let notes = ReadNotes::default();
        let read = |start: u64, end: u64| assert!(notes.is_present(&(start..end)));
        read(40 * UNIT, 40 * UNIT + 512);
        read(0, 2 * UNIT);
        read(2 * UNIT - 1, 3 * UNIT + 1);
        read(40 * UNIT, 42 * UNIT);
        assert_eq!(notes.units().rows, [(40, 1), (0, 4), (41, 1)]);
        read(100 * UNIT, (100 + 2 * UNITS_MAX as u64) * UNIT);
        let count: u32 = notes.units().rows.iter().map(|row| row.1).sum();
        assert_eq!(count as usize, UNITS_MAX);
        read(u64::MAX - 1, u64::MAX);
    }
}
