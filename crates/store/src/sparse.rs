//! A sparse file, a map of the units that are present, and the units that are being filled.
//!
//! Partial images ([`crate::partial`]) and disk caches ([`crate::disk_cache`]) are such files. Each
//! adds its own policy: where bytes come from, whether they are verified, and which part of the map
//! survives a reboot of the host.
//!
//! Bytes are written before their bit is set, and bits are cleared before a hole is punched. A
//! missing unit is filled by one thread while others that need it wait: the unit is *in flight*.

use crate::presence::PresenceMap;
use jiffy_sys::locked::Locked;
use jiffy_sys::mutex::{lock, read, unpoisoned, write};
use rustix::fs::{FallocateFlags, fallocate};
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, RwLock};

/// A sparse file with its map. `O` is the outcome of a flight. Safe to use from many threads.
#[derive(Debug)]
pub(crate) struct SparseFile<O> {
    file: Locked,
    map: PresenceMap,
    /// The bytes that the map covers; all others are always present.
    mapped: Range<u64>,
    flights: Mutex<HashMap<u64, Arc<Flight<O>>>>,
    landed: Condvar,
    /// Held for reading while present units are read, for writing while units are dropped, so that
    /// no thread reads a hole in place of a unit.
    gate: RwLock<()>,
}

/// Units that one thread is filling.
#[derive(Debug)]
pub struct Flight<O> {
    units: Range<u64>,
    outcome: OnceLock<O>,
}

impl<O> Flight<O> {
    /// The units.
    pub fn units(&self) -> Range<u64> {
        self.units.clone()
    }
}

/// The next step of a thread to make units present.
#[derive(Debug)]
pub enum Claim<O> {
    /// Nothing: they are present.
    Nothing,
    /// Fill these, and call `end_flight` whatever the outcome.
    Fill(Arc<Flight<O>>),
    /// Wait for another thread.
    Wait(Arc<Flight<O>>),
}

impl<O: Clone> SparseFile<O> {
    /// `map` must be the map of `file`; `mapped` are the bytes that it covers.
    pub fn new(file: Locked, map: PresenceMap, mapped: Range<u64>) -> SparseFile<O> {
        SparseFile {
            file,
            map,
            mapped,
            flights: Mutex::default(),
            landed: Condvar::new(),
            gate: RwLock::default(),
        }
    }

    pub fn file(&self) -> &File {
        &self.file
    }

    pub fn map(&self) -> &PresenceMap {
        &self.map
    }

    /// The units that hold these bytes; empty for bytes that the map does not cover.
    pub fn units_of(&self, bytes: &Range<u64>) -> Range<u64> {
        let bytes = self.clip(bytes);
        match bytes.is_empty() {
            true => 0..0,
            false => self.map.units_of(&bytes),
        }
    }

    /// The bytes of these units that the map covers.
    pub fn bytes_of(&self, units: &Range<u64>) -> Range<u64> {
        self.clip(&self.map.bytes_of(units))
    }

    /// All units that hold bytes the map covers.
    pub fn all_units(&self) -> Range<u64> {
        self.units_of(&self.mapped)
    }

    fn clip(&self, bytes: &Range<u64>) -> Range<u64> {
        let start = bytes.start.max(self.mapped.start);
        start..bytes.end.min(self.mapped.end).max(start)
    }

    /// Whether all of these bytes are there.
    pub fn has(&self, bytes: &Range<u64>) -> bool {
        self.map.has_all(self.units_of(bytes))
    }

    /// Writes all bytes of some units, then marks the units as present.
    ///
    /// # Errors
    ///
    /// If the file or its map can't be written.
    pub fn put(&self, units: Range<u64>, bytes: &[u8]) -> io::Result<()> {
        // No unit may be dropped between the two steps.
        let _gate = read(&self.gate);
        self.file
            .write_all_at(bytes, self.bytes_of(&units).start)
            .and_then(|()| self.map.set(units))
    }

    /// Reads bytes; false if not all of them are present.
    ///
    /// # Errors
    ///
    /// If the file can't be read.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<bool> {
        let bytes = offset..offset.saturating_add(into.len() as u64);
        let _gate = read(&self.gate);
        match self.has(&bytes) {
            true => self.file.read_exact_at(into, offset).map(|()| true),
            false => Ok(false),
        }
    }

    /// Drops units: marks them as missing and punches holes. With `durably`, the map is synced
    /// first, so that no loss of power leaves a bit set for a hole. Returns the bytes that were
    /// freed.
    ///
    /// # Errors
    ///
    /// If the map can't be written or synced, or `fallocate` or `fstat` fails.
    pub fn drop_units(&self, units: &[Range<u64>], durably: bool) -> io::Result<u64> {
        let _gate = write(&self.gate);
        let before = self.file.metadata()?.blocks();
        for units in units {
            self.map.clear(units.clone())?;
        }
        if durably {
            self.map.sync()?;
        }
        for units in units {
            let bytes = self.bytes_of(units);
            if !bytes.is_empty() {
                let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                fallocate(&*self.file, how, bytes.start, bytes.end - bytes.start)?;
            }
        }
        let after = self.file.metadata()?.blocks();
        Ok(before.saturating_sub(after) * 512)
    }

    /// The next step of this thread to make `units` present; at most `most` units at once.
    pub fn claim(&self, units: &Range<u64>, most: u64) -> Claim<O> {
        let most = most.max(1);
        let mut flights = self.flights();
        let mut other = None;
        let mut at = units.start;
        while let Some(run) = self.map.next_missing(at..units.end) {
            other = other.or_else(|| flights.get(&run.start).cloned());
            let is_free = |unit: &u64| !flights.contains_key(unit);
            if let Some(start) = run.clone().find(is_free) {
                let end = run.end.min(start + most);
                let end = (start..end).find(|unit| !is_free(unit)).unwrap_or(end);
                return Claim::Fill(begin(&mut flights, start..end));
            }
            at = run.end;
        }
        other.map_or(Claim::Nothing, Claim::Wait)
    }

    /// Waits until none of `units` is in flight, then takes all of them in flight for the caller,
    /// whether they are present or not.
    pub fn claim_exclusive(&self, units: Range<u64>) -> Arc<Flight<O>> {
        let flights = self.flights();
        let waited = self.landed.wait_while(flights, |flights| {
            units.clone().any(|unit| flights.contains_key(&unit))
        });
        let mut flights = unpoisoned(waited);
        begin(&mut flights, units)
    }

    /// Ends a flight and wakes the threads that wait for it.
    pub fn end_flight(&self, flight: &Flight<O>, outcome: O) {
        let mut flights = self.flights();
        for unit in flight.units.clone() {
            flights.remove(&unit);
        }
        let _ = flight.outcome.set(outcome);
        drop(flights);
        self.landed.notify_all();
    }

    /// Waits for a flight of another thread.
    pub fn wait(&self, flight: &Flight<O>) -> O {
        let mut flights = self.flights();
        loop {
            if let Some(outcome) = flight.outcome.get() {
                return outcome.clone();
            }
            let waited = self.landed.wait(flights);
            flights = unpoisoned(waited);
        }
    }

    /// Waits until nothing is in flight.
    pub fn wait_for_all(&self) {
        let flights = self.flights();
        let waited = self
            .landed
            .wait_while(flights, |flights| !flights.is_empty());
        drop(unpoisoned(waited));
    }

    fn flights(&self) -> MutexGuard<'_, HashMap<u64, Arc<Flight<O>>>> {
        lock(&self.flights)
    }
}

fn begin<O>(flights: &mut HashMap<u64, Arc<Flight<O>>>, units: Range<u64>) -> Arc<Flight<O>> {
    let flight = Arc::new(Flight {
        units: units.clone(),
        outcome: OnceLock::new(),
    });
    flights.extend(units.map(|unit| (unit, flight.clone())));
    flight
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_wire::disk::MapHeader;
    use std::slice::from_ref;
    use std::thread;
    use std::time::Duration;

    const UNIT: u64 = 4096;

    /// A file of ten units, of which the first half unit is not mapped.
    fn file(folder: &tempfile::TempDir) -> SparseFile<u32> {
        let header = MapHeader {
            unit: UNIT as u32,
            length: 10 * UNIT,
            tail: 10 * UNIT,
            image: [1; 16],
            boot: [0; 16],
        };
        let map = PresenceMap::create(&folder.path().join("map"), header).unwrap();
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(folder.path().join("file"))
            .unwrap();
        file.set_len(10 * UNIT).unwrap();
        SparseFile::new(Locked::held_elsewhere(file), map, UNIT / 2..10 * UNIT)
    }

    #[test]
    fn put_units_are_present_and_dropped_ones_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let file = file(&folder);
        assert_eq!(file.all_units(), 0..10);
        assert_eq!(file.bytes_of(&(0..1)), UNIT / 2..UNIT);
        assert!(file.has(&(0..UNIT / 2)), "no unit covers these bytes");
        assert!(!file.has(&(0..UNIT)));
        file.put(0..2, &[7; 6144]).unwrap();
        let mut bytes = [0; 100];
        assert!(file.read(UNIT - 50, &mut bytes).unwrap());
        assert_eq!(bytes, [7; 100]);
        assert!(!file.read(2 * UNIT - 50, &mut bytes).unwrap());
        assert_eq!(file.drop_units(from_ref(&(1..2)), true).unwrap(), UNIT);
        assert!(file.has(&(0..UNIT)) && !file.has(&(UNIT..UNIT + 1)));
    }

    #[test]
    fn one_thread_fills_units_while_others_wait() {
        let folder = tempfile::tempdir().unwrap();
        let file = file(&folder);
        let Claim::Fill(first) = file.claim(&(2..9), 4) else {
            panic!("the claim must be to fill");
        };
        assert_eq!(first.units(), 2..6);
        let Claim::Fill(second) = file.claim(&(0..9), 4) else {
            panic!("there is more");
        };
        assert_eq!(second.units(), 0..2, "up to what is in flight");
        let Claim::Fill(third) = file.claim(&(2..9), 4) else {
            panic!("there is more");
        };
        assert_eq!(third.units(), 6..9);
        // Not by the thread: if it began after the end of the first flight, it would wait for the
        // third.
        let Claim::Wait(flight) = file.claim(&(3..8), 4) else {
            panic!("all of it is in flight");
        };
        thread::scope(|scope| {
            let waits = scope.spawn(|| file.wait(&flight));
            let replaces = scope.spawn(|| file.claim_exclusive(5..7).units());
            thread::sleep(Duration::from_millis(20));
            assert!(!waits.is_finished() && !replaces.is_finished());
            file.put(2..6, &[1; 4 * 4096]).unwrap();
            file.end_flight(&first, 11);
            assert_eq!(waits.join().unwrap(), 11);
            file.end_flight(&third, 13);
            assert_eq!(replaces.join().unwrap(), 5..7);
        });
        file.end_flight(&second, 12);
        assert!(matches!(file.claim(&(2..5), 4), Claim::Nothing));
    }
}
