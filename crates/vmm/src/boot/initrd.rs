//! The initrd: the first PVH module, or Linux's ramdisk.

use super::{BootError, Module, Source, source};
use jiffy_devices::GuestMemory;
use std::path::{Path, PathBuf};

const PAGE: u64 = 4096;

/// An initrd that was placed but not loaded yet.
#[derive(Debug)]
pub struct Initrd {
    /// Its range of guest memory.
    pub place: Module,
    path: PathBuf,
    file: source::OpenFile,
}

/// Opens the file and chooses its place: as high as `limit` allows, page-aligned, above
/// `kernel_end`. Both are guest physical addresses.
///
/// # Errors
///
/// If the file can't be opened or is empty, or does not fit between `kernel_end` and `limit`.
pub fn open_and_place(path: &Path, kernel_end: u64, limit: u64) -> Result<Initrd, BootError> {
    let file = source::open(path).map_err(|source| BootError::Open {
        what: "initrd",
        path: path.into(),
        source,
    })?;
    let size = file.len();
    if size == 0 {
        return Err(BootError::EmptyInitrd { path: path.into() });
    }
    let address = place(size, kernel_end, limit).ok_or_else(|| BootError::InitrdTooLarge {
        path: path.into(),
        size,
        room: limit.saturating_sub(kernel_end),
    })?;
    Ok(Initrd {
        place: Module { address, size },
        path: path.into(),
        file,
    })
}

impl Initrd {
    /// Reads it into guest memory.
    ///
    /// # Errors
    ///
    /// If the file can't be read, or was shortened meanwhile.
    pub fn load(&self, memory: &GuestMemory) -> Result<(), BootError> {
        source::copy(&self.file, 0, self.place.size, memory, self.place.address).map_err(|source| {
            BootError::Read {
                what: "initrd",
                path: self.path.clone(),
                source,
            }
        })
    }
}

fn place(size: u64, kernel_end: u64, limit: u64) -> Option<u64> {
    let address = limit.checked_sub(size)? & !(PAGE - 1);
    (address >= kernel_end).then_some(address)
}

#[cfg(test)]
mod tests {
    use super::place;

    #[test]
    fn the_initrd_is_placed_high_page_aligned_and_clear_of_the_kernel() {
        assert_eq!(place(1, 0x10_0000, 0x400_0000), Some(0x3ff_f000));
        assert_eq!(place(0x1000, 0x10_0000, 0x400_0000), Some(0x3ff_f000));
        assert_eq!(place(0x1001, 0x10_0000, 0x400_0000), Some(0x3ff_e000));
        assert_eq!(place(0x1001, 0x3ff_e001, 0x400_0000), None);
        assert_eq!(place(u64::MAX, 0, 0x400_0000), None);
    }
}
