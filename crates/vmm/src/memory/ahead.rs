//! RAM that is made before the VM is known.

use super::{GuestRam, MemoryError, NAME};
use jiffy_devices::GuestMemory;
use jiffy_sys::memfd::{self, Pages};
use rustix::fs::FallocateFlags;
use std::fs::File;
use std::io;
use std::ops::Range;
use vm_memory::{Bytes, GuestAddress};

/// The huge pages that Linux uses by the end of its first command, MiB. Those that every Linux uses
/// by its boot's end, whatever the size of RAM up to 3 GiB (of more, without the second to fourth),
/// are that of the boot's structures, those that its allocator gives out first, and those of the
/// kernel itself. Last come one for programs, and two of its own structures at the end of RAM, if
/// that has [`SIZE_AHEAD`].
const USED_FIRST: [u64; 10] = [0, 4, 8, 10, 16, 18, 20, 2, 124, 126];
/// Size of RAM that VMs have unless they ask for another.
const SIZE_AHEAD: u64 = 128 << 20;

/// The beginning of RAM whose size is not known yet.
#[derive(Debug)]
pub struct RamAhead {
    file: File,
    ram: GuestRam,
    /// How many huge pages were allocated.
    allocated: usize,
}

impl RamAhead {
    /// End of the memory that is allocated for a kernel, guest physical.
    pub const KERNEL_END: u64 = 22 << 20;

    /// Nothing is allocated yet.
    ///
    /// # Errors
    ///
    /// If the file can't be made or mapped.
    pub fn new() -> Result<RamAhead, MemoryError> {
        let create = || {
            let file = memfd::create(NAME, SIZE_AHEAD, Pages::Small)?;
            Ok((file.try_clone()?, file))
        };
        let (file, mapped) = create().map_err(MemoryError::Create)?;
        let ram = GuestRam::map_memfd(mapped, SIZE_AHEAD, Pages::Small)?;
        ram.allow_huge_pages();
        let allocated = 0;
        Ok(RamAhead {
            file,
            ram,
            allocated,
        })
    }

    /// Allocates one more huge page that a boot needs first, of which the kernel has to clear every
    /// byte, if the host offers huge pages. False if there is none left.
    pub fn allocate_next(&mut self) -> bool {
        let Some(address) = USED_FIRST.get(self.allocated) else {
            return false;
        };
        self.allocated += 1;
        let touched = self
            .ram
            .memory()
            .write_obj(0u8, GuestAddress(*address << 20));
        touched.is_ok()
    }

    /// The memory that there is so far.
    pub fn memory(&self) -> &GuestMemory {
        self.ram.memory()
    }

    /// Makes a range of the file, bytes, zero again.
    ///
    /// # Errors
    ///
    /// If the kernel refuses; the range is as it was.
    pub fn clear(&self, range: Range<u64>) -> io::Result<()> {
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let length = range.end.saturating_sub(range.start);
        Ok(rustix::fs::fallocate(&self.file, how, range.start, length)?)
    }

    /// The file for [`GuestRam::create_in`].
    pub fn into_file(self) -> File {
        self.file
    }
}
