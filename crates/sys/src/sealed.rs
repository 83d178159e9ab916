//! Bytes that one process writes and another reads without a copy: a memfd that is filled, sealed,
//! and then sent.
#![allow(unsafe_code)] // Slices of mappings.

use crate::memfd::{self, Pages};
use rustix::fs::{SealFlags, fcntl_add_seals, fcntl_get_seals, fstatfs};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::{self, NonNull};
use std::slice;

/// Memory that nobody can change or shorten any more.
const SEALED: SealFlags = SealFlags::WRITE
    .union(SealFlags::SHRINK)
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

/// Memory that is filled; only this process has it.
#[derive(Debug)]
pub struct Unsealed {
    mapping: Mapping,
    file: File,
}

impl Unsealed {
    /// This many bytes, all of them zero. A page takes memory once it is written.
    ///
    /// # Errors
    ///
    /// If `bytes` is 0, or memfd_create(2), ftruncate(2) or mmap(2) fails.
    pub fn new(name: &str, bytes: usize) -> io::Result<Unsealed> {
        let file = memfd::create(name, bytes as u64, Pages::Small)?;
        let mapping = Mapping::new(
            &file,
            bytes,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED,
        )?;
        Ok(Unsealed { mapping, file })
    }

    /// Ends the filling. The file can be sent to a process that is not trusted with more than
    /// reading it.
    ///
    /// # Errors
    ///
    /// If fcntl(2) refuses the seals.
    pub fn seal(self) -> io::Result<File> {
        // The kernel refuses to seal memory that is mapped for writing.
        drop(self.mapping);
        fcntl_add_seals(&self.file, SEALED)?;
        Ok(self.file)
    }
}

impl Deref for Unsealed {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping is readable, lives as long as this value, and nothing else has the
        // memfd or the mapping: the bytes only change through `deref_mut`.
        unsafe { slice::from_raw_parts(self.mapping.start.as_ptr(), self.mapping.bytes) }
    }
}

impl DerefMut for Unsealed {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; it is also writable, and `self` is borrowed exclusively.
        unsafe { slice::from_raw_parts_mut(self.mapping.start.as_ptr(), self.mapping.bytes) }
    }
}

/// A part of memory that another process has filled and sealed.
#[derive(Debug)]
pub struct Sealed {
    mapping: Mapping,
    part: Range<usize>,
}

impl Sealed {
    /// Maps these bytes of a file of another process, of which nothing is trusted.
    ///
    /// # Errors
    ///
    /// `InvalidData` if it is not a sealed memfd of small pages, or does not have these bytes.
    pub fn map(file: &File, part: Range<usize>) -> io::Result<Sealed> {
        let refused = |why| Err(io::Error::new(io::ErrorKind::InvalidData, why));
        let seals = fcntl_get_seals(file);
        if !seals.is_ok_and(|seals| seals.contains(SEALED)) {
            return refused("the memory is not sealed");
        }
        // A read of huge pages raises SIGBUS if the host's pool of them is empty.
        if fstatfs(file)?.f_type != libc::TMPFS_MAGIC {
            return refused("the memory does not consist of small pages");
        }
        if part.start > part.end || part.end as u64 > file.metadata()?.len() {
            return refused("the memory is shorter than the bytes that it should have");
        }
        // Private, because kernels before Linux 6.7 map no sealed memory as shared.
        let mapping = Mapping::new(file, part.end, ProtFlags::READ, MapFlags::PRIVATE)?;
        Ok(Sealed { mapping, part })
    }
}

impl AsRef<[u8]> for Sealed {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the mapping is readable and lives as long as this value. The memfd is sealed:
        // its bytes can't change, and it can't be truncated.
        let all = unsafe { slice::from_raw_parts(self.mapping.start.as_ptr(), self.mapping.bytes) };
        &all[self.part.clone()]
    }
}

/// The beginning of a file in memory.
#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a mapping belongs to the process, and may be used and unmapped by any thread.
unsafe impl Send for Mapping {}
// SAFETY: as above; it is only written through an exclusive reference to its owner.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(file: &File, bytes: usize, access: ProtFlags, kind: MapFlags) -> io::Result<Mapping> {
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe { mmap(ptr::null_mut(), bytes, access, kind, file, 0)? };
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapping { start, bytes })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping, and no borrow of it is left.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, memfd_create};
    use std::os::unix::fs::FileExt;

    fn filled(bytes: usize) -> Unsealed {
        let mut memory = Unsealed::new("test", bytes).unwrap();
        for (at, byte) in memory.iter_mut().enumerate() {
            *byte = at as u8;
        }
        memory
    }

    #[test]
    fn sealed_bytes_are_read_and_can_not_be_changed() {
        let file = filled(10_000).seal().unwrap();
        let part = Sealed::map(&file, 300..9_000).unwrap();
        assert!(
            (300..9_000)
                .map(|at| at as u8)
                .eq(part.as_ref().iter().copied())
        );
        assert!(file.write_all_at(b"x", 0).is_err());
        assert!(file.set_len(5_000).is_err());
        assert!(file.set_len(20_000).is_err());
        assert!(Sealed::map(&file, 10_000..10_001).is_err());
        assert!(Unsealed::new("test", 0).is_err());
    }

    #[test]
    fn memory_that_its_sender_can_change_is_refused() {
        let refused = |file: &File| {
            let error = Sealed::map(file, 0..100).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        };
        refused(&filled(4096).file);
        for missing in [SealFlags::WRITE, SealFlags::SHRINK] {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let file = File::from(memfd_create("test", flags).unwrap());
            file.set_len(4096).unwrap();
            fcntl_add_seals(&file, SEALED - missing - SealFlags::SEAL).unwrap();
            refused(&file);
        }
        refused(&tempfile::tempfile().unwrap());
        // Without reserved pages: the pool of this host may be empty.
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
        if let Ok(file) = memfd_create("test", flags) {
            let file = File::from(file);
            file.set_len(2 << 20).unwrap();
            fcntl_add_seals(&file, SEALED).unwrap();
            refused(&file);
        }
    }
}
