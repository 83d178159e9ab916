//! Memory that a userfaultfd may fill at any time.
#![allow(unsafe_code)] // mmap, and accesses to memory that others change.

use super::Userfaultfd;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// A mapping that is accessed only atomically, so that a userfaultfd may fill it and many threads
/// may use it at any time. Replays and tests use it in place of guest memory.
#[derive(Debug)]
pub struct Arena {
    base: *mut AtomicU8,
    length: usize,
    /// The madvise(2) advice that discards pages.
    discard: Advice,
}

// SAFETY: every access is atomic; the mapping lives as long as the value.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

impl Arena {
    /// `length` bytes of private anonymous memory, in whole pages, without huge pages.
    ///
    /// # Errors
    ///
    /// If mmap(2) fails.
    pub fn anonymous(length: usize) -> io::Result<Arena> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let base = unsafe { mmap_anonymous(std::ptr::null_mut(), length, protection, flags) }?;
        let arena = Arena {
            base: base.cast(),
            length,
            discard: Advice::LinuxDontNeed,
        };
        // SAFETY: the mapping is new, and this only affects which pages back it. A kernel without
        // huge pages returns an error that does not matter.
        let _ = unsafe { madvise(base, length, Advice::LinuxNoHugepage) };
        Ok(arena)
    }

    /// Maps the first `length` bytes of a file (a memfd), shared.
    ///
    /// # Errors
    ///
    /// If mmap(2) fails.
    pub fn shared(file: &File, length: usize) -> io::Result<Arena> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses. Others may change the file;
        // all accesses are atomic.
        let base = unsafe {
            mmap(
                std::ptr::null_mut(),
                length,
                protection,
                MapFlags::SHARED,
                file,
                0,
            )
        }?;
        Ok(Arena {
            base: base.cast(),
            length,
            discard: Advice::LinuxRemove,
        })
    }

    /// Its address in this process.
    pub fn address(&self) -> u64 {
        self.base as u64
    }

    /// Its length, bytes.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Reports its missing pages to this userfaultfd. A thread that touches one then sleeps until
    /// it is filled.
    ///
    /// # Errors
    ///
    /// If `UFFDIO_REGISTER` fails.
    pub fn register(&self, uffd: &Userfaultfd) -> io::Result<()> {
        // SAFETY: this value owns the mapping, and nothing expects contents in it.
        unsafe { uffd.register(self.address(), self.length as u64) }
    }

    /// Reads one byte; may sleep until its page is filled. Panics beyond the end.
    pub fn read(&self, offset: usize) -> u8 {
        self.at(offset).load(Ordering::Relaxed)
    }

    /// Writes one byte; may sleep until its page is filled. Panics beyond the end.
    pub fn write(&self, offset: usize, byte: u8) {
        self.at(offset).store(byte, Ordering::Relaxed);
    }

    /// Copies bytes out; may sleep until their pages are filled. Panics beyond the end.
    pub fn read_into(&self, offset: usize, bytes: &mut [u8]) {
        if !(offset | bytes.len()).is_multiple_of(8) {
            for (index, byte) in bytes.iter_mut().enumerate() {
                *byte = self.read(offset + index);
            }
            return;
        }
        for (index, word) in bytes.chunks_exact_mut(8).enumerate() {
            word.copy_from_slice(&self.word(offset + index * 8).to_ne_bytes());
        }
    }

    /// Discards `length` bytes from `offset` on, both in whole pages (`MADV_DONTNEED`, for a file
    /// `MADV_REMOVE`): they are missing again. If removals are reported, blocks until the event was
    /// read.
    ///
    /// # Errors
    ///
    /// `InvalidInput` beyond the end. Otherwise if madvise(2) fails.
    pub fn discard(&self, offset: usize, length: usize) -> io::Result<()> {
        if offset
            .checked_add(length)
            .is_none_or(|end| end > self.length)
        {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        // SAFETY: within this value's mapping, on whose contents nothing relies.
        unsafe {
            madvise(self.base.add(offset).cast(), length, self.discard)?;
        }
        Ok(())
    }

    /// Reads eight bytes at an offset that is a multiple of eight.
    fn word(&self, offset: usize) -> u64 {
        assert!(
            offset.is_multiple_of(8) && offset + 8 <= self.length,
            "beyond the arena"
        );
        // SAFETY: in bounds, aligned (the mapping begins with a page), and mapped as long as `self`
        // exists.
        unsafe { &*self.base.add(offset).cast::<AtomicU64>() }.load(Ordering::Relaxed)
    }

    fn at(&self, offset: usize) -> &AtomicU8 {
        assert!(offset < self.length, "beyond the arena");
        // SAFETY: in bounds of a mapping that exists as long as `self`.
        unsafe { &*self.base.add(offset) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: this value made the mapping, and no reference outlives it. Unmapping a whole
        // mapping can't fail.
        let _ = unsafe { munmap(self.base.cast(), self.length) };
    }
}
