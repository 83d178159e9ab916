//! Which pages of a file are in the page cache.
#![allow(unsafe_code)] // mmap and mincore.

use rustix::fs::{Advice, SeekFrom, fadvise, seek};
use rustix::io::{ReadWriteFlags, preadv2};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::ops::Range;
use std::ptr;

const PAGE: u64 = 4096;
/// How many pages [`is_mostly_cached`] looks at, at equal distances.
const SAMPLES: u64 = 16;

/// Writes a file back and drops its pages from the page cache. Pages that are mapped stay, and so do
/// all pages of a file system that is in memory.
///
/// # Errors
///
/// If fdatasync(2) or posix_fadvise(2) fails.
pub fn drop_pages(file: &File) -> io::Result<()> {
    file.sync_data()?;
    Ok(fadvise(file, 0, None, Advice::DontNeed)?)
}

/// The ranges of a file, in bytes and whole pages, that are in the page cache, in order. The kernel
/// tells it only to the file's owner and to those that may write to it; for others all pages are
/// (mincore(2)).
///
/// # Errors
///
/// If the file can't be mapped, or mincore(2) fails.
pub fn cached_ranges(file: &File) -> io::Result<Vec<Range<u64>>> {
    let pages = file.metadata()?.len().div_ceil(PAGE);
    if pages == 0 {
        return Ok(Vec::new());
    }
    let mut states = vec![0u8; usize::try_from(pages).map_err(io::Error::other)?];
    let length = states.len() * PAGE as usize;
    // SAFETY: a new mapping at an address that the kernel chooses. Nothing accesses its memory.
    let address = unsafe {
        mmap(
            ptr::null_mut(),
            length,
            ProtFlags::READ,
            MapFlags::SHARED,
            file,
            0,
        )?
    };
    // SAFETY: the mapping has this length, and the kernel writes one byte for each of its pages.
    let told = match unsafe { libc::mincore(address, length, states.as_mut_ptr()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    // SAFETY: the mapping was made above, and nothing refers to it.
    unsafe { munmap(address, length)? };
    told?;
    let mut ranges: Vec<Range<u64>> = Vec::new();
    for (page, state) in (0..).zip(states) {
        if state & 1 == 0 {
            continue;
        }
        let at = page * PAGE;
        match ranges.last_mut() {
            Some(last) if last.end == at => last.end += PAGE,
            _ => ranges.push(at..at + PAGE),
        }
    }
    Ok(ranges)
}

/// Whether most of a file's data is in the page cache, as far as [`SAMPLES`] pages show. False of a
/// file without data, and of one on a file system that can't tell.
///
/// # Errors
///
/// If fstat(2) or lseek(2) fails.
pub fn is_mostly_cached(file: &File) -> io::Result<bool> {
    let length = file.metadata()?.len();
    let (mut seen, mut cached) = (0, 0);
    let mut next = 0;
    for sample in 0..SAMPLES {
        let from = (length / SAMPLES * sample).max(next);
        let at = match seek(file, SeekFrom::Data(from)) {
            Ok(at) => at,
            // Only a hole follows.
            Err(rustix::io::Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        seen += 1;
        let byte = &mut [0; 1];
        let buffers = &mut [IoSliceMut::new(byte)];
        // EAGAIN if the page would have to be read from the disk.
        cached += u64::from(preadv2(file, buffers, at, ReadWriteFlags::NOWAIT).is_ok());
        next = at + PAGE;
    }
    Ok(cached * 2 > seen)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    /// Not in /tmp, which may be a file system in memory.
    fn file_on_disk() -> File {
        tempfile::tempfile_in("/var/tmp").unwrap()
    }

    #[test]
    fn pages_that_were_read_are_cached() {
        let file = file_on_disk();
        let pages = 512;
        file.write_all_at(&vec![1; (pages * PAGE) as usize], 0)
            .unwrap();
        let cached = |range: Range<u64>| assert_eq!(cached_ranges(&file).unwrap(), vec![range]);
        cached(0..pages * PAGE);
        drop_pages(&file).unwrap();
        assert_eq!(cached_ranges(&file).unwrap(), []);

        // Without readahead, so only this page.
        fadvise(&file, 0, None, Advice::Random).unwrap();
        file.read_exact_at(&mut [0; 10], 7 * PAGE).unwrap();
        cached(7 * PAGE..8 * PAGE);
    }

    #[test]
    fn a_file_is_mostly_cached_if_most_pages_of_its_data_are() {
        let file = file_on_disk();
        // Data in the first and the last quarter.
        let length = 1024 * PAGE;
        file.set_len(length).unwrap();
        let data = vec![1; (length / 4) as usize];
        for at in [0, length / 4 * 3] {
            file.write_all_at(&data, at).unwrap();
        }
        assert!(is_mostly_cached(&file).unwrap());
        drop_pages(&file).unwrap();
        assert!(!is_mostly_cached(&file).unwrap());
        let mut data = data;
        file.read_exact_at(&mut data, 0).unwrap();
        file.read_exact_at(&mut data, length / 4 * 3).unwrap();
        assert!(is_mostly_cached(&file).unwrap());
    }

    #[test]
    fn an_empty_file_has_no_pages() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(cached_ranges(&file).unwrap(), []);
        assert!(!is_mostly_cached(&file).unwrap());
    }
}
