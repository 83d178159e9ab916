//! Dispatches port and memory-mapped I/O to devices by address.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use thiserror::Error;

/// A device that answers reads and writes in a range of addresses.
///
/// `offset` is relative to the start of the range. The guest chooses offset and length, so any
/// offset and any length (1 to 8 bytes, or more for string I/O) may come. A read must fill all of
/// `data`.
pub trait BusDevice: Send {
    /// Reads from `offset` into `data`.
    fn read(&mut self, offset: u64, data: &mut [u8]);
    /// Writes `data` at `offset`.
    fn write(&mut self, offset: u64, data: &[u8]);
}

/// A range overlaps that of another device.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("addresses {start:#x} to {end:#x} are empty, wrap around, or overlap another device")]
pub struct RangeTaken {
    /// First address.
    pub start: u64,
    /// Last address.
    pub end: u64,
}

/// Devices by address. Only accesses within one device's range are dispatched.
#[derive(Default, Clone)]
pub struct Bus {
    ranges: BTreeMap<u64, (u64, Arc<Mutex<dyn BusDevice>>)>,
}

impl Bus {
    /// An empty bus.
    pub fn new() -> Bus {
        Bus::default()
    }

    /// Assigns `length` addresses from `start` on to `device`.
    ///
    /// # Errors
    ///
    /// [`RangeTaken`] if another device has one of the addresses, or if the range is empty or ends
    /// beyond the address space.
    pub fn insert(
        &mut self,
        start: u64,
        length: u64,
        device: Arc<Mutex<dyn BusDevice>>,
    ) -> Result<(), RangeTaken> {
        let end = length
            .checked_sub(1)
            .and_then(|last| start.checked_add(last))
            .ok_or(RangeTaken { start, end: start })?;
        let before = self.ranges.range(..=end).next_back();
        if before.is_some_and(|(_, (other_end, _))| *other_end >= start) {
            return Err(RangeTaken { start, end });
        }
        self.ranges.insert(start, (end, device));
        Ok(())
    }

    /// Reads. If no device has the range, returns false and fills `data` with ones, as a real bus
    /// does.
    pub fn read(&self, address: u64, data: &mut [u8]) -> bool {
        match self.find(address, data.len()) {
            Some((offset, device)) => {
                device.lock().expect("device lock").read(offset, data);
                true
            }
            None => {
                data.fill(0xff);
                false
            }
        }
    }

    /// Writes; false if no device has the range.
    pub fn write(&self, address: u64, data: &[u8]) -> bool {
        match self.find(address, data.len()) {
            Some((offset, device)) => {
                device.lock().expect("device lock").write(offset, data);
                true
            }
            None => false,
        }
    }

    /// String input (`rep ins`): reads `width` bytes at one address repeatedly until `data` is
    /// full. The device gets all bytes in one call.
    pub fn read_each(&self, address: u64, width: usize, data: &mut [u8]) -> bool {
        let Some((offset, device)) = self.find(address, width) else {
            data.fill(0xff);
            return false;
        };
        let mut device = device.lock().expect("device lock");
        if width == 1 {
            device.read(offset, data);
        } else {
            data.chunks_mut(width)
                .for_each(|item| device.read(offset, item));
        }
        true
    }

    /// String output (`rep outs`): writes each `width` bytes of `data` to one address. The device
    /// gets all bytes in one call.
    pub fn write_each(&self, address: u64, width: usize, data: &[u8]) -> bool {
        let Some((offset, device)) = self.find(address, width) else {
            return false;
        };
        let mut device = device.lock().expect("device lock");
        if width == 1 {
            device.write(offset, data);
        } else {
            data.chunks(width)
                .for_each(|item| device.write(offset, item));
        }
        true
    }

    fn find(&self, address: u64, length: usize) -> Option<(u64, &Mutex<dyn BusDevice>)> {
        let (start, (end, device)) = self.ranges.range(..=address).next_back()?;
        let last = address.checked_add((length as u64).saturating_sub(1))?;
        (last <= *end).then(|| (address - start, &**device))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Echo(Vec<(u64, Vec<u8>)>);

    impl BusDevice for Echo {
        fn read(&mut self, offset: u64, data: &mut [u8]) {
            data.fill(offset as u8);
        }
        fn write(&mut self, offset: u64, data: &[u8]) {
            self.0.push((offset, data.to_vec()));
        }
    }

    #[test]
    fn an_access_reaches_the_device_whose_range_contains_it() {
        let echo = Arc::new(Mutex::new(Echo(Vec::new())));
        let mut bus = Bus::new();
        bus.insert(0x100, 0x10, echo.clone()).unwrap();
        let mut data = [0; 4];
        assert!(bus.read(0x10c, &mut data));
        assert_eq!(data, [0xc; 4]);
        assert!(!bus.read(0x10d, &mut data), "leaves the range");
        assert_eq!(data, [0xff; 4]);
        assert!(!bus.write(0xff, &[1]));
        assert!(!bus.write(u64::MAX, &[1, 2]), "wraps around");
        assert!(bus.write(0x104, &[7]));
        assert_eq!(echo.lock().unwrap().0, [(4, vec![7])]);
    }

    #[test]
    fn string_io_repeats_one_address() {
        let echo = Arc::new(Mutex::new(Echo(Vec::new())));
        let mut bus = Bus::new();
        bus.insert(0x100, 2, echo.clone()).unwrap();
        let mut data = [0; 64];
        assert!(bus.read_each(0x101, 1, &mut data));
        assert_eq!(data, [1; 64]);
        assert!(!bus.read_each(0x101, 2, &mut data), "leaves the range");
        assert_eq!(data, [0xff; 64]);
        assert!(bus.write_each(0x100, 2, &[1, 2, 3, 4]));
        assert!(bus.write_each(0x100, 1, &[5, 6]));
        assert!(!bus.write_each(0x200, 1, &[7]));
        assert_eq!(
            echo.lock().unwrap().0,
            [(0, vec![1, 2]), (0, vec![3, 4]), (0, vec![5, 6])]
        );
    }

    #[test]
    fn overlapping_empty_and_wrapping_ranges_are_refused() {
        let echo = Arc::new(Mutex::new(Echo(Vec::new())));
        let mut bus = Bus::new();
        bus.insert(0x100, 0x10, echo.clone()).unwrap();
        for (start, length) in [
            (0x10f, 1),
            (0xf0, 0x11),
            (0x0, 0x1000),
            (5, 0),
            (u64::MAX, 2),
        ] {
            assert!(
                bus.insert(start, length, echo.clone()).is_err(),
                "{start:#x}+{length:#x}"
            );
        }
        bus.insert(0x110, 1, echo.clone()).unwrap();
        bus.insert(0xff, 1, echo).unwrap();
    }
}
