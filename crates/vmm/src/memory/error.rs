//! What can be wrong with guest RAM.

use crate::layout;
use std::io;
use std::path::PathBuf;
use thiserror::Error;
use vm_memory::mmap::MmapRegionError;

/// Guest RAM could not be made.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// Less than 64 MiB or more than the address space holds.
    #[error("a VM can have {} MiB to {} MiB of memory, not {size_mib} MiB", layout::MIN_RAM >> 20, layout::MAX_RAM >> 20)]
    Size {
        /// Asked for.
        size_mib: u32,
    },
    /// The size is no multiple of the page size.
    #[error("{size_mib} MiB of memory can't be made of pages of {} MiB", page >> 20)]
    NotWholePages {
        /// Asked for.
        size_mib: u32,
        /// Bytes of a page.
        page: u64,
    },
    /// The processor or the kernel has no such pages.
    #[error("this host has no huge pages of {} MiB", page >> 20)]
    NoHugePages {
        /// Bytes of a page.
        page: u64,
    },
    /// The pool is too small.
    #[error("{needed} free huge pages of {} MiB are needed, the host has {free}", page >> 20)]
    TooFewHugePages {
        /// How many the VM needs.
        needed: u64,
        /// How many are free and not reserved.
        free: u64,
        /// Bytes of a page.
        page: u64,
    },
    /// Prefault of more than the host has.
    #[error("{} MiB of memory are to be prefaulted, but the host has {} MiB available", needed >> 20, available >> 20)]
    NotAvailable {
        /// Bytes the VM needs.
        needed: u64,
        /// Bytes the host has.
        available: u64,
    },
    /// The memfd could not be made.
    #[error("memory for the guest could not be made")]
    Create(#[source] io::Error),
    /// The memfd could not be mapped.
    #[error("memory for the guest could not be mapped")]
    Map(#[source] MmapRegionError),
    /// The pages could not be touched in advance.
    #[error("memory for the guest could not be prefaulted")]
    Prefault(#[source] io::Error),
    /// A file that holds saved memory.
    #[error("the saved memory {} can't be opened", .0.display())]
    Open(PathBuf, #[source] io::Error),
    /// A descriptor that should hold saved memory.
    #[error("descriptor {0} is not open, but the saved memory should be there")]
    NoDescriptor(i32),
    /// A file of another size.
    #[error("the saved memory has {actual} bytes, the VM has {expected}")]
    Length {
        /// Of the VM.
        expected: u64,
        /// Of the file.
        actual: u64,
    },
    /// The description of the layers.
    #[error("the layout of the saved memory is not valid: {0}")]
    Layout(String),
    /// Its layers could not be put where they belong.
    #[error("the saved memory could not be mapped")]
    MapSaved(#[source] io::Error),
    /// Huge pages come from a pool that has none for the copies.
    #[error("the memory of a VM in huge pages can't be captured")]
    HugePages,
    /// It can't be captured; nothing was changed.
    #[error("what the guest has written since it was last captured can't be told")]
    Written(#[source] io::Error),
    /// RAM could not be frozen.
    #[error("the guest's memory could not be frozen")]
    Freeze(#[source] io::Error),
    /// What a pager shares could not be mapped.
    #[error("what the pager has of the guest's memory could not be mapped")]
    Share(#[source] io::Error),
    /// The pager has not filled everything yet.
    #[error("the guest's memory is not all here yet; the pager has to fill it first")]
    Incomplete,
    /// KVM refused the memory.
    #[error("KVM did not take the guest's memory")]
    Register(#[source] kvm_ioctls::Error),
}

impl MemoryError {
    /// What the user can do.
    pub fn hint(&self) -> Option<String> {
        match self {
            MemoryError::TooFewHugePages { needed, page, .. } => Some(format!(
                "reserve them: echo {needed} > /sys/kernel/mm/hugepages/hugepages-{}kB/nr_hugepages (as root), or use 4K pages",
                page >> 10
            )),
            MemoryError::NoHugePages { page: 0x4000_0000 } => {
                Some("use 2M or 4K pages; 1 GiB pages need the CPU flag pdpe1gb".into())
            }
            MemoryError::NoHugePages { .. } => Some("use 4K pages".into()),
            MemoryError::NotWholePages { page, .. } => {
                Some(format!("use a multiple of {} MiB", page >> 20))
            }
            MemoryError::MapSaved(error) if error.raw_os_error() == Some(libc::ENOMEM) => {
                Some("raise vm.max_map_count (sysctl): it is mapped in many pieces".into())
            }
            MemoryError::NotAvailable { .. } => Some("use less memory, or no prefault".into()),
            _ => None,
        }
    }
}
