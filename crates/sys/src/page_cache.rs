//! Which pages of a file are in the page cache.
#![allow(unsafe_code)] // mmap and mincore.

use rustix::fs::{Advice, fadvise};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::ptr;

const PAGE: u64 = 4096;

/// Writes a file back and drops its pages from the page cache. Pages that are mapped stay, and so do
/// all pages of a file system that is in memory.
pub fn drop_pages(file: &File) -> io::Result<()> {
    file.sync_data()?;
    Ok(fadvise(file, 0, None, Advice::DontNeed)?)
}

/// The ranges of a file, in bytes and whole pages, that are in the page cache, in order. The kernel
/// tells it only to the file's owner and to those that may write to it; for others all pages are
/// (mincore(2)).
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn pages_that_were_read_are_cached() {
        // Not in /tmp, which may be a file system in memory.
        let folder = tempfile::tempdir_in("/var/tmp").unwrap();
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(folder.path().join("file"))
            .unwrap();
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
    fn an_empty_file_has_no_pages() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(cached_ranges(&file).unwrap(), []);
    }
}
