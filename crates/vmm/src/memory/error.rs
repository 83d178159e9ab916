//! Errors of guest RAM.

use crate::layout;
use std::io;
use std::path::PathBuf;
use thiserror::Error;
use vm_memory::mmap::MmapRegionError;

/// Why guest RAM could not be created, restored or captured.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The size is less than 64 MiB or more than the address space holds.
    #[error("a VM can have {} MiB to {} MiB of memory, not {size_mib} MiB", layout::MIN_RAM >> 20, layout::MAX_RAM >> 20)]
    Size {
        /// The configured size.
        size_mib: u32,
    },
    /// The size is not a multiple of the page size.
    #[error("{size_mib} MiB of memory is not a multiple of the page size, {} MiB", page >> 20)]
    NotWholePages {
        /// The configured size.
        size_mib: u32,
        /// Bytes of a page.
        page: u64,
    },
    /// The processor or the kernel does not have such pages.
    #[error("this host has no huge pages of {} MiB", page >> 20)]
    NoHugePages {
        /// Bytes of a page.
        page: u64,
    },
    /// The pool of huge pages is too small.
    #[error("{needed} free huge pages of {} MiB are needed, the host has {free}", page >> 20)]
    TooFewHugePages {
        /// How many the VM needs.
        needed: u64,
        /// How many are free and not reserved.
        free: u64,
        /// Bytes of a page.
        page: u64,
    },
    /// The VM's memory is to be prefaulted, and the host has not enough.
    #[error("{} MiB of memory are to be prefaulted, but the host has {} MiB available", needed >> 20, available >> 20)]
    NotAvailable {
        /// Bytes that the VM needs.
        needed: u64,
        /// Bytes that the host has available.
        available: u64,
    },
    /// The memfd could not be created.
    #[error("memory for the guest could not be created")]
    Create(#[source] io::Error),
    /// The memfd could not be mapped.
    #[error("memory for the guest could not be mapped")]
    Map(#[source] MmapRegionError),
    /// The pages could not be prefaulted.
    #[error("memory for the guest could not be prefaulted")]
    Prefault(#[source] io::Error),
    /// A file of saved memory can't be opened.
    #[error("the saved memory {} can't be opened", .0.display())]
    Open(PathBuf, #[source] io::Error),
    /// The descriptor of a file of saved memory is not open.
    #[error("descriptor {0}, which should be the saved memory, is not open")]
    NoDescriptor(i32),
    /// A file of saved memory has another size.
    #[error("the saved memory has {actual} bytes, the VM has {expected}")]
    Length {
        /// Bytes of the VM's memory.
        expected: u64,
        /// Bytes of the file.
        actual: u64,
    },
    /// The description of the layers is not valid.
    #[error("the layout of the saved memory is not valid: {0}")]
    Layout(String),
    /// The layers could not be mapped.
    #[error("the saved memory could not be mapped")]
    MapSaved(#[source] io::Error),
    /// The VM uses huge pages, whose pool has none for copies.
    #[error("the memory of a VM in huge pages can't be captured")]
    HugePages,
    /// The written pages could not be found. Nothing was changed.
    #[error("the pages that the guest has written since its last capture could not be found")]
    Written(#[source] io::Error),
    /// RAM could not be frozen.
    #[error("the guest's memory could not be frozen")]
    Freeze(#[source] io::Error),
    /// The file that the pager shares could not be mapped.
    #[error("the memory that the pager shares could not be mapped")]
    Share(#[source] io::Error),
    /// The pager has not filled all of the memory yet.
    #[error("the guest's memory is not complete yet; the pager has to fill it first")]
    Incomplete,
    /// KVM refused the memory.
    #[error("KVM refused the guest's memory")]
    Register(#[source] kvm_ioctls::Error),
}

impl MemoryError {
    /// What the user can do about it.
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
                Some("raise vm.max_map_count (sysctl): the memory is mapped in many pieces".into())
            }
            MemoryError::NotAvailable { .. } => Some("use less memory, or no prefault".into()),
            _ => None,
        }
    }
}
