//! The map of the units that are present in a file that is filled on demand (`docs/disk-cache.md`):
//! kept in memory, and written through to its file, which other processes may map.
//!
//! An open map is locked exclusively (flock), so only one process fills the file.

use jiffy_sys::locked::Locked;
use jiffy_sys::mutex::lock;
use jiffy_wire::disk::{MAP_HEADER, MapError, MapHeader};
use rustix::io::{ReadWriteFlags, pwritev2};
use std::fs::{self, File, OpenOptions};
use std::io::{self, IoSlice};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

/// Why a map cannot be used. The message is one sentence that names the file.
#[derive(Debug, thiserror::Error)]
#[error("{}: {fault}", path.display())]
pub struct PresenceError {
    /// The map's file.
    pub path: PathBuf,
    /// What is wrong with it.
    #[source]
    pub fault: PresenceFault,
}

/// What is wrong with a map.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PresenceFault {
    /// Another process, or another part of this one, fills the file.
    #[error("is in use: another process fills this file")]
    InUse,
    /// The host cannot read or write it.
    #[error("cannot be used")]
    Io(#[from] io::Error),
    /// The file is not a valid map.
    #[error(transparent)]
    Map(#[from] MapError),
}

/// A map as it was when it was read, whoever has it open.
pub struct ReadMap {
    /// Its header.
    pub header: MapHeader,
    bits: Vec<u8>,
}

impl ReadMap {
    /// Reads a map without locking it.
    ///
    /// # Errors
    ///
    /// If the file can't be opened or read, or is not a valid map.
    pub fn read(path: &Path) -> Result<ReadMap, PresenceError> {
        let read = || ReadMap::of(&File::open(path)?);
        read().map_err(|fault| failed(path, fault))
    }

    fn of(file: &File) -> Result<ReadMap, PresenceFault> {
        let length = file.metadata()?.len();
        let mut head = [0; MAP_HEADER];
        read_start(file, &mut head)?;
        let header = MapHeader::decode(&head, length)?;
        // The length agrees with the header.
        let mut bits = vec![0; (length - MAP_HEADER as u64) as usize];
        file.read_exact_at(&mut bits, MAP_HEADER as u64)?;
        Ok(ReadMap { header, bits })
    }

    /// Bytes of the units that are not present.
    pub fn missing_bytes(&self) -> u64 {
        let units = self.header.units();
        let (whole, rest) = self.bits.split_at((units / 8) as usize);
        // Bits after the last unit have no meaning.
        let last = rest
            .first()
            .map_or(0, |bits| bits & ((1 << (units % 8)) - 1));
        let present: u64 = whole.iter().map(|bits| u64::from(bits.count_ones())).sum();
        (units - present - u64::from(last.count_ones())) * u64::from(self.header.unit)
    }
}

/// A map, open and locked.
#[derive(Debug)]
pub struct PresenceMap {
    file: Locked,
    path: PathBuf,
    header: MapHeader,
    words: Box<[AtomicU64]>,
    /// Held while words are written to the file, so that an older word never replaces a newer one.
    writing: Mutex<()>,
}

impl PresenceMap {
    /// Creates a map with no bit set. An existing map is replaced, unless it is in use.
    ///
    /// # Errors
    ///
    /// If there are too many units, the map is in use, or it can't be written.
    pub fn create(path: &Path, header: MapHeader) -> Result<PresenceMap, PresenceError> {
        let make = || {
            header.check_units()?;
            let file = open_locked(path, true)?;
            file.set_len(0)?;
            file.set_len(header.file_bytes())?;
            file.write_all_at(&header.encode(), 0)?;
            Ok(file)
        };
        let file = make().map_err(|fault| failed(path, fault))?;
        Ok(PresenceMap::new(file, path, header, &[]))
    }

    /// Opens a map and reads all of it.
    ///
    /// # Errors
    ///
    /// If the map can't be opened or read, is in use, or is not valid.
    pub fn open(path: &Path) -> Result<PresenceMap, PresenceError> {
        let read = || {
            let file = open_locked(path, false)?;
            let map = ReadMap::of(&file)?;
            Ok((file, map))
        };
        let (file, map) = read().map_err(|fault| failed(path, fault))?;
        Ok(PresenceMap::new(file, path, map.header, &map.bits))
    }

    fn new(file: Locked, path: &Path, header: MapHeader, bits: &[u8]) -> PresenceMap {
        let words = header.units().div_ceil(64) as usize;
        let (given, _) = bits.as_chunks();
        let given = given.iter().map(|bytes| u64::from_le_bytes(*bytes));
        PresenceMap {
            file,
            path: path.to_owned(),
            header,
            words: given
                .chain(std::iter::repeat(0))
                .take(words)
                .map(AtomicU64::new)
                .collect(),
            writing: Mutex::new(()),
        }
    }

    /// The path of the map.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether its path still names this file.
    pub(crate) fn has_its_name(&self) -> io::Result<bool> {
        let own = self.file.metadata()?;
        match fs::metadata(&self.path) {
            Ok(named) => Ok((named.dev(), named.ino()) == (own.dev(), own.ino())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The header, as it was when the map was opened.
    pub fn header(&self) -> &MapHeader {
        &self.header
    }

    /// How many units there are.
    pub fn units(&self) -> u64 {
        self.header.units()
    }

    /// The units that hold these bytes.
    pub fn units_of(&self, bytes: &Range<u64>) -> Range<u64> {
        let unit = u64::from(self.header.unit);
        bytes.start / unit..bytes.end.div_ceil(unit).min(self.units())
    }

    /// The bytes of these units, up to the file's end.
    pub fn bytes_of(&self, units: &Range<u64>) -> Range<u64> {
        let unit = u64::from(self.header.unit);
        units.start * unit..(units.end * unit).min(self.header.length)
    }

    /// Whether a unit is present.
    pub fn get(&self, unit: u64) -> bool {
        self.words
            .get((unit / 64) as usize)
            .is_some_and(|word| word.load(Ordering::Acquire) & (1 << (unit % 64)) != 0)
    }

    /// Whether all of these units are present.
    pub fn has_all(&self, units: Range<u64>) -> bool {
        words_of(units).all(|(word, mask)| self.word(word) & mask == mask)
    }

    /// How many units are present.
    pub fn count(&self) -> u64 {
        words_of(0..self.units())
            .map(|(word, mask)| u64::from((self.word(word) & mask).count_ones()))
            .sum()
    }

    /// Marks units as present. Their bytes must be written before.
    ///
    /// # Errors
    ///
    /// If the map's file can't be written. No bit in memory is then set.
    pub fn set(&self, units: Range<u64>) -> io::Result<()> {
        let units = units.start..units.end.min(self.units());
        let _one = lock(&self.writing);
        // The bits in memory are set last, because other processes that learn of them read the
        // file.
        self.write(units.clone(), |word, mask| word | mask)?;
        for (word, mask) in words_of(units) {
            self.words[word].fetch_or(mask, Ordering::AcqRel);
        }
        Ok(())
    }

    /// Marks units as missing.
    ///
    /// # Errors
    ///
    /// If the map's file can't be written. The bits in memory are cleared nevertheless.
    pub fn clear(&self, units: Range<u64>) -> io::Result<()> {
        let units = units.start..units.end.min(self.units());
        for (word, mask) in words_of(units.clone()) {
            self.words[word].fetch_and(!mask, Ordering::AcqRel);
        }
        let _one = lock(&self.writing);
        self.write(units, |word, _| word)
    }

    /// The next run of missing units within `units`.
    pub fn next_missing(&self, units: Range<u64>) -> Option<Range<u64>> {
        let mut at = units.start;
        while at < units.end && self.get(at) {
            let word = self.word((at / 64) as usize);
            at = if word == u64::MAX {
                (at / 64 + 1) * 64
            } else {
                at + 1
            };
        }
        let start = at.min(units.end);
        let end = (start..units.end)
            .find(|unit| self.get(*unit))
            .unwrap_or(units.end);
        (start < end).then_some(start..end)
    }

    /// Binds the bits to a boot of the host, or to none ([`MapHeader::boot`]), durably.
    ///
    /// Written and synced with one call: a killed process keeps its lock until the call has
    /// returned, so no other process reads a header that may not be on the disk.
    pub(crate) fn bind(&self, boot: [u8; 16]) -> io::Result<()> {
        let header = MapHeader {
            boot,
            ..self.header
        };
        let bytes = header.encode();
        let written = pwritev2(
            &*self.file,
            &[IoSlice::new(&bytes)],
            0,
            ReadWriteFlags::DSYNC,
        )?;
        match written == bytes.len() {
            true => Ok(()),
            false => Err(io::ErrorKind::WriteZero.into()),
        }
    }

    /// Syncs the map to the disk.
    pub(crate) fn sync(&self) -> io::Result<()> {
        self.file.sync_all()
    }

    /// Unlocks the map for other processes. The caller must not change it any more.
    pub(crate) fn release(&self) {
        self.file.unlock();
    }

    /// Sets the time of the last use, by which a bounded cache chooses what to drop.
    pub(crate) fn touch(&self) {
        // The time is only a hint, so errors are ignored.
        let _ = self.file.set_modified(SystemTime::now());
    }

    fn word(&self, index: usize) -> u64 {
        self.words
            .get(index)
            .map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// Writes the words that hold these units. `adapt` gets each word and the mask of these units'
    /// bits in it. The caller must hold `writing`.
    fn write(&self, units: Range<u64>, adapt: impl Fn(u64, u64) -> u64) -> io::Result<()> {
        let first = units.start / 64;
        let bytes: Vec<u8> = words_of(units)
            .flat_map(|(word, mask)| adapt(self.word(word), mask).to_le_bytes())
            .collect();
        self.file
            .write_all_at(&bytes, MAP_HEADER as u64 + first * 8)
    }
}

/// The words that hold these bits, with the mask of the bits in each.
fn words_of(units: Range<u64>) -> impl Iterator<Item = (usize, u64)> {
    let mut at = units.start;
    std::iter::from_fn(move || {
        if at >= units.end {
            return None;
        }
        let end = units.end.min((at / 64 + 1) * 64);
        let mask = (u64::MAX >> (64 - (end - at))) << (at % 64);
        let word = (at / 64) as usize;
        at = end;
        Some((word, mask))
    })
}

fn open_locked(path: &Path, create: bool) -> Result<Locked, PresenceFault> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(create)
        .truncate(false)
        .open(path)?;
    Locked::try_exclusive(file)?.ok_or(PresenceFault::InUse)
}

/// Reads the first bytes of a file; bytes past its end are zeros.
fn read_start(file: &File, bytes: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        match file.read_at(&mut bytes[done..], done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn failed(path: &Path, fault: PresenceFault) -> PresenceError {
    PresenceError {
        path: path.to_owned(),
        fault,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header(units: u64) -> MapHeader {
        MapHeader {
            unit: 4096,
            length: units * 4096,
            tail: units * 4096,
            image: [1; 16],
            boot: [0; 16],
        }
    }

    #[test]
    fn a_map_is_open_once_and_survives_reopening() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("present");
        let map = PresenceMap::create(&path, header(200)).unwrap();
        map.set(3..130).unwrap();
        map.clear(64..66).unwrap();
        let busy = PresenceMap::open(&path).unwrap_err();
        assert!(matches!(busy.fault, PresenceFault::InUse), "{busy}");
        drop(map);
        let map = PresenceMap::open(&path).unwrap();
        assert_eq!(map.count(), 125);
        assert!(map.has_all(3..64) && map.has_all(66..130) && !map.has_all(63..65));
        assert_eq!(map.next_missing(3..200), Some(64..66));
        assert_eq!(map.next_missing(66..200), Some(130..200));
        assert_eq!(map.next_missing(10..20), None);
    }

    #[test]
    fn a_bit_that_cannot_be_written_is_not_set() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("present");
        let mut map = PresenceMap::create(&path, header(200)).unwrap();
        map.set(3..5).unwrap();
        map.file = Locked::held_elsewhere(File::open(&path).unwrap());
        map.set(2..130).unwrap_err();
        assert_eq!(map.next_missing(0..200), Some(0..3));
        assert_eq!(map.count(), 2);
        drop(map);
        assert_eq!(PresenceMap::open(&path).unwrap().count(), 2);
    }

    #[test]
    fn damaged_and_foreign_files_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("present");
        drop(PresenceMap::create(&path, header(200)).unwrap());
        let good = fs::read(&path).unwrap();
        let huge = MapHeader {
            length: 1 << 62,
            ..header(1)
        };
        let error = PresenceMap::create(&path, huge).unwrap_err();
        assert!(matches!(error.fault, PresenceFault::Map(_)), "{error}");
        assert_eq!(fs::read(&path).unwrap(), good, "nothing was touched");
        for cut in [0, 1, MAP_HEADER, good.len() - 1] {
            fs::write(&path, &good[..cut]).unwrap();
            let error = PresenceMap::open(&path).unwrap_err();
            assert!(matches!(error.fault, PresenceFault::Map(_)), "{error}");
        }
        for bit in 0..MAP_HEADER * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            fs::write(&path, &bad).unwrap();
            PresenceMap::open(&path).unwrap_err();
        }
    }

    proptest! {
        #[test]
        fn set_clear_and_next_missing_agree_with_single_bits(changes in prop::collection::vec((any::<bool>(), 0u64..300, 0u64..200), 0..8)) {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("present");
            let map = PresenceMap::create(&path, header(333)).unwrap();
            let mut expected = vec![false; 333];
            for (set, start, length) in changes {
                let range = start..start + length;
                if set { map.set(range.clone()) } else { map.clear(range.clone()) }.unwrap();
                let end = (range.end as usize).min(333);
                expected[(start as usize).min(end)..end].fill(set);
            }
            drop(map);
            let map = PresenceMap::open(&path).unwrap();
            for (unit, there) in (0..).zip(&expected) {
                prop_assert_eq!(map.get(unit), *there);
            }
            let mut at = 0;
            while let Some(missing) = map.next_missing(at..333) {
                prop_assert!(expected[at as usize..missing.start as usize].iter().all(|there| *there));
                prop_assert!(!expected[missing.start as usize..missing.end as usize].iter().any(|there| *there));
                at = missing.end;
            }
            prop_assert!(expected[at as usize..].iter().all(|there| *there));
            prop_assert_eq!(map.count(), expected.iter().filter(|there| **there).count() as u64);
        }

        #[test]
        fn any_file_is_a_map_or_an_error(head: [u8; 8], sizes in (any::<u32>(), any::<u64>(), any::<u64>()), bits in prop::collection::vec(any::<u8>(), 0..64)) {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("present");
            let (unit, length, tail) = sizes;
            let header = MapHeader { unit, length, tail, image: [0; 16], boot: [0; 16] };
            let mut bytes = header.encode().to_vec();
            if head[0] % 2 == 0 {
                bytes[..8].copy_from_slice(&head);
            }
            bytes.extend(&bits);
            fs::write(&path, &bytes).unwrap();
            if let Ok(map) = PresenceMap::open(&path) {
                prop_assert_eq!(map.header().file_bytes(), bytes.len() as u64);
                let _ = map.next_missing(0..map.units());
            }
        }
    }
}
