//! A read-only mapping of a file that another process writes.
#![allow(unsafe_code)] // mmap, and memory that others change.

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::fs::File;
use std::io;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};

/// A whole file as little-endian 64-bit words, read one at a time. Other processes may write them
/// meanwhile. The file must not be truncated: a read beyond its end raises SIGBUS.
#[derive(Debug)]
pub struct MappedWords {
    start: NonNull<AtomicU64>,
    words: usize,
}

// SAFETY: the mapping is shared, and any thread only reads it, atomically.
unsafe impl Send for MappedWords {}
// SAFETY: as above.
unsafe impl Sync for MappedWords {}

impl MappedWords {
    /// Maps a whole file.
    ///
    /// # Errors
    ///
    /// `InvalidData` if the file is shorter than one word (8 bytes). Otherwise if fstat(2) or
    /// mmap(2) fails.
    pub fn new(file: &File) -> io::Result<MappedWords> {
        let words = usize::try_from(file.metadata()?.len() / 8).map_err(io::Error::other)?;
        if words == 0 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the file is shorter than one 64-bit word",
            ));
        }
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe {
            mmap(
                ptr::null_mut(),
                words * 8,
                ProtFlags::READ,
                MapFlags::SHARED,
                file,
                0,
            )?
        };
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(MappedWords { start, words })
    }

    /// Number of words.
    pub fn len(&self) -> usize {
        self.words
    }

    /// Never true: a mapping has at least one word.
    pub fn is_empty(&self) -> bool {
        self.words == 0
    }

    /// A word, loaded with acquire ordering; 0 beyond the end.
    pub fn get(&self, index: usize) -> u64 {
        if index >= self.words {
            return 0;
        }
        // SAFETY: the address is within the mapping, which exists as long as `self` and is
        // page-aligned. Only atomics read it.
        let word = unsafe { self.start.add(index).as_ref() };
        u64::from_le(word.load(Ordering::Acquire))
    }
}

impl Drop for MappedWords {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping, and no borrow of it is left.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.words * 8) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn writes_to_the_file_are_visible() {
        let file = tempfile::tempfile().unwrap();
        assert!(MappedWords::new(&file).is_err(), "an empty file");
        file.set_len(24).unwrap();
        let words = MappedWords::new(&file).unwrap();
        assert_eq!((words.len(), words.get(1), words.get(3)), (3, 0, 0));
        file.write_all_at(&7_u64.to_le_bytes(), 8).unwrap();
        assert_eq!((words.get(0), words.get(1), words.get(2)), (0, 7, 0));
    }
}
