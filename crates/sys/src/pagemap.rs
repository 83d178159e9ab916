//! Which pages of a private mapping this process has written.
//!
//! Source: Linux `Documentation/admin-guide/mm/pagemap.rst`. The ioctl `PAGEMAP_SCAN` (6.7) walks
//! the page tables in the kernel. On older kernels the entries are read one by one.
#![allow(unsafe_code)] // One ioctl.

use crate::handed;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

const PAGE: u64 = 4096;

/// `_IOWR('f', 16, struct pm_scan_arg)`.
pub const PAGEMAP_SCAN: u32 = 3 << 30 | (size_of::<ScanArgument>() as u32) << 16 | 0x66 << 8 | 16;

const IS_FILE: u64 = 1 << 2;
const IS_PRESENT: u64 = 1 << 3;
const IS_SWAPPED: u64 = 1 << 4;
const IS_ZERO_PAGE: u64 = 1 << 5;

const ENTRY_FILE: u64 = 1 << 61;
const ENTRY_SWAPPED: u64 = 1 << 62;
const ENTRY_PRESENT: u64 = 1 << 63;

/// Ranges per ioctl.
const BATCH: usize = 256;

#[repr(C)]
#[derive(Default)]
struct ScanArgument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    regions: u64,
    regions_length: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_any_of_mask: u64,
    return_mask: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

/// Arguments of `PAGEMAP_SCAN`: categories of pages, and what the kernel does to the pages
/// that it finds.
#[derive(Debug, Clone, Copy, Default)]
pub struct Wanted {
    /// `PM_SCAN_…`
    pub flags: u64,
    /// Categories that are inverted before they are compared (`category_inverted`).
    pub inverted: u64,
    /// A page must be in all of these (`category_mask`).
    pub all_of: u64,
    /// A page must be in one of these, if there are any (`category_anyof_mask`).
    pub any_of: u64,
    /// Categories that are reported (`return_mask`); the kernel merges neighbours with equal ones.
    pub returned: u64,
}

/// Anonymous pages, in memory or swapped, without the shared zero page.
const OWN_PAGES: Wanted = Wanted {
    flags: 0,
    inverted: IS_FILE | IS_ZERO_PAGE,
    all_of: IS_FILE | IS_ZERO_PAGE,
    any_of: IS_PRESENT | IS_SWAPPED,
    // Present and swapped are not reported, so a run is one region.
    returned: IS_FILE,
};

/// The open page map of this process.
#[derive(Debug)]
pub struct Pagemap {
    file: File,
}

impl Pagemap {
    /// Opens the page map.
    ///
    /// # Errors
    ///
    /// If `/proc/self/pagemap` can't be opened.
    pub fn open() -> io::Result<Pagemap> {
        let name = Path::new(handed::PAGEMAP);
        let file = match handed::copy(name) {
            Some(file) => file?.into(),
            None => File::open(name)?,
        };
        Ok(Pagemap { file })
    }

    /// Pages in `addresses` (whole pages of this process's mappings) that belong to this process
    /// alone: in a private mapping of a file, pages written since it was mapped. Sorted, neighbours
    /// merged.
    ///
    /// # Errors
    ///
    /// If `PAGEMAP_SCAN` fails though the kernel has it, or, on an older kernel, a read of the page
    /// map fails.
    pub fn own_pages(&self, addresses: Range<u64>) -> io::Result<Vec<Range<u64>>> {
        match self.scan(addresses.clone(), &OWN_PAGES) {
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(libc::ENOTTY | libc::EINVAL | libc::EOPNOTSUPP)
                ) =>
            {
                self.read(addresses)
            }
            other => other,
        }
    }

    /// Pages in `addresses` that match `wanted`. Sorted, neighbours merged.
    ///
    /// # Errors
    ///
    /// If `PAGEMAP_SCAN` fails: `ENOTTY` if the kernel does not have it.
    pub fn scan(&self, addresses: Range<u64>, wanted: &Wanted) -> io::Result<Vec<Range<u64>>> {
        let mut found = Vec::new();
        let mut regions = [Region::default(); BATCH];
        let mut at = addresses.start;
        while at < addresses.end {
            let mut argument = ScanArgument {
                size: size_of::<ScanArgument>() as u64,
                flags: wanted.flags,
                start: at,
                end: addresses.end,
                regions: regions.as_mut_ptr() as u64,
                regions_length: BATCH as u64,
                category_inverted: wanted.inverted,
                category_mask: wanted.all_of,
                category_any_of_mask: wanted.any_of,
                return_mask: wanted.returned,
                ..ScanArgument::default()
            };
            // SAFETY: the argument has the size that it names and points to BATCH regions; both
            // outlive the call.
            let count = unsafe {
                libc::ioctl(
                    self.file.as_raw_fd(),
                    PAGEMAP_SCAN as libc::Ioctl,
                    &raw mut argument,
                )
            };
            let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
            for region in &regions[..count.min(BATCH)] {
                push(&mut found, region.start..region.end);
            }
            if argument.walk_end <= at {
                return Err(io::Error::other("PAGEMAP_SCAN makes no progress"));
            }
            at = argument.walk_end;
        }
        Ok(found)
    }

    fn read(&self, addresses: Range<u64>) -> io::Result<Vec<Range<u64>>> {
        let mut found = Vec::new();
        let mut bytes = [0; 8 * 512];
        let mut page = addresses.start / PAGE;
        let end = addresses.end / PAGE;
        while page < end {
            let count = 512.min(end - page);
            let entries = &mut bytes[..count as usize * 8];
            self.file.read_exact_at(entries, page * 8)?;
            for (number, entry) in (page..).zip(entries.chunks_exact(8)) {
                let entry = u64::from_le_bytes(entry.try_into().expect("8 bytes"));
                if entry & (ENTRY_PRESENT | ENTRY_SWAPPED) != 0 && entry & ENTRY_FILE == 0 {
                    push(&mut found, number * PAGE..(number + 1) * PAGE);
                }
            }
            page += count;
        }
        Ok(found)
    }
}

/// Appends a range, or extends the last one if they touch.
pub fn push(ranges: &mut Vec<Range<u64>>, range: Range<u64>) {
    match ranges.last_mut() {
        Some(last) if last.end == range.start => last.end = range.end,
        _ => ranges.push(range),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memfd;
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

    #[test]
    fn only_written_pages_of_a_private_mapping_are_anonymous() {
        let file = memfd::create("test", 64 * PAGE, memfd::Pages::Small).unwrap();
        for page in 0..32 {
            file.write_all_at(&[7], page * PAGE).unwrap();
        }
        // SAFETY: a new mapping of 64 pages, used only below.
        let base = unsafe {
            mmap(
                std::ptr::null_mut(),
                64 * PAGE as usize,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
                &file,
                0,
            )
        }
        .unwrap()
        .cast::<u8>();
        let start = base as u64;
        for page in [3_usize, 4, 40] {
            // SAFETY: inside the mapping.
            unsafe { base.add(page * PAGE as usize).write_volatile(1) };
        }
        // SAFETY: inside the mapping.
        assert_eq!(
            unsafe { base.add(10 * PAGE as usize).read_volatile() },
            7,
            "reading makes no page our own"
        );
        let map = Pagemap::open().unwrap();
        let range = |from: u64, to: u64| start + from * PAGE..start + to * PAGE;
        let expected = vec![range(3, 5), range(40, 41)];
        assert_eq!(map.own_pages(range(0, 64)).unwrap(), expected);
        assert_eq!(map.read(range(0, 64)).unwrap(), expected);
        assert_eq!(map.own_pages(range(5, 40)).unwrap(), []);
        // SAFETY: the mapping is not used any more.
        unsafe { munmap(base.cast(), 64 * PAGE as usize) }.unwrap();
    }
}
