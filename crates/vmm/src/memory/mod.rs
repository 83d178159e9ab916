//! Guest RAM: a memfd, mapped, and registered with KVM.

use crate::layout;
use jiffy_devices::GuestMemory;
use jiffy_sys::memfd::{self, Pages};
use jiffy_wire::vmm::{Memory, PageSize};
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use std::fs::{self, File};
use std::io;
use std::sync::Arc;
use thiserror::Error;
use vm_memory::mmap::MmapRegionError;
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap, MmapRegion,
};

/// Guest RAM.
#[derive(Debug, Clone)]
pub struct GuestRam {
    memory: Arc<GuestMemory>,
    file: Arc<File>,
    size: u64,
}

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
            MemoryError::NotAvailable { .. } => Some("use less memory, or no prefault".into()),
            _ => None,
        }
    }
}

impl GuestRam {
    /// Makes RAM as configured. Huge pages are reserved by this, so that a
    /// guest never meets a missing one.
    pub fn create(config: &Memory) -> Result<GuestRam, MemoryError> {
        let size = u64::from(config.size_mib) << 20;
        if !(layout::MIN_RAM..=layout::MAX_RAM).contains(&size) {
            return Err(MemoryError::Size {
                size_mib: config.size_mib,
            });
        }
        let pages = match config.pages {
            PageSize::Small => Pages::Small,
            PageSize::Huge2M => Pages::Huge2M,
            PageSize::Huge1G => Pages::Huge1G,
        };
        let page = pages.bytes();
        if !size.is_multiple_of(page) {
            return Err(MemoryError::NotWholePages {
                size_mib: config.size_mib,
                page,
            });
        }
        if pages != Pages::Small {
            let needed = size / page;
            let free = pages
                .free_in_pool()
                .ok_or(MemoryError::NoHugePages { page })?;
            if free < needed {
                return Err(MemoryError::TooFewHugePages { needed, free, page });
            }
        }
        if config.prefault
            && pages == Pages::Small
            && let Some(available) = available_memory()
            && available < size
        {
            return Err(MemoryError::NotAvailable {
                needed: size,
                available,
            });
        }
        let file = memfd::create("jiffy guest RAM", size, pages).map_err(MemoryError::Create)?;
        let ram = GuestRam::from_file(file, size, pages)?;
        if config.prefault {
            ram.prefault().map_err(MemoryError::Prefault)?;
        }
        Ok(ram)
    }

    /// Maps `size` bytes of existing memory: that of another VM, or a restored one.
    pub fn from_file(file: File, size: u64, pages: Pages) -> Result<GuestRam, MemoryError> {
        let file = Arc::new(file);
        let mut offset = 0;
        let mut regions = Vec::with_capacity(2);
        // Shared, so that the file is the memory. Small pages are allocated
        // when touched; huge ones are reserved from their pool now.
        let flags = libc::MAP_SHARED
            | match pages {
                Pages::Small => libc::MAP_NORESERVE,
                _ => 0,
            };
        for (start, length) in layout::ram_ranges(size) {
            let mapping = MmapRegion::build(
                Some(FileOffset::from_arc(file.clone(), offset)),
                length as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
            )
            .map_err(MemoryError::Map)?;
            let region = GuestRegionMmap::new(mapping, GuestAddress(start))
                .expect("guest RAM ends far below the last address");
            regions.push(region);
            offset += length;
        }
        let memory = GuestMemory::from_regions(regions).expect("the ranges are in order");
        let ram = GuestRam {
            memory: Arc::new(memory),
            file,
            size,
        };
        if pages == Pages::Small {
            ram.allow_huge_pages();
        }
        Ok(ram)
    }

    /// The mapping, for devices and loaders.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// The memfd; RAM above the hole follows RAM below it.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Bytes of RAM.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Gives the memory to KVM, one slot a range. The VM must not outlive it.
    #[allow(unsafe_code)] // KVM keeps the host addresses.
    pub fn register(&self, vm: &VmFd) -> Result<(), MemoryError> {
        for (slot, region) in (0..).zip(self.memory.iter()) {
            let slot = kvm_userspace_memory_region {
                slot,
                flags: 0,
                guest_phys_addr: region.start_addr().0,
                memory_size: region.len(),
                userspace_addr: region.as_ptr() as u64,
            };
            // SAFETY: the range is a mapping of exactly this size, which only
            // the guest and volatile accesses use, and which outlives the VM.
            unsafe { vm.set_user_memory_region(slot) }.map_err(MemoryError::Register)?;
        }
        Ok(())
    }

    /// Lets the kernel back it with transparent huge pages, where the host
    /// offers them for shared memory: one fault instead of 512.
    #[allow(unsafe_code)] // madvise
    fn allow_huge_pages(&self) {
        for region in self.memory.iter() {
            // SAFETY: the range is our own mapping; this changes no byte. A
            // kernel without transparent huge pages refuses, which is fine.
            let _ = unsafe {
                rustix::mm::madvise(
                    region.as_ptr().cast(),
                    region.len() as usize,
                    rustix::mm::Advice::LinuxHugepage,
                )
            };
        }
    }

    #[allow(unsafe_code)] // madvise
    fn prefault(&self) -> io::Result<()> {
        for region in self.memory.iter() {
            // SAFETY: the range is our own mapping; populating it changes no
            // byte. Lack of memory is an error here, not a signal later.
            unsafe {
                rustix::mm::madvise(
                    region.as_ptr().cast(),
                    region.len() as usize,
                    rustix::mm::Advice::LinuxPopulateWrite,
                )
            }?;
        }
        Ok(())
    }
}

/// MemAvailable, bytes.
fn available_memory() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::Bytes;

    fn config(size_mib: u32, pages: PageSize) -> Memory {
        Memory {
            size_mib,
            pages,
            prefault: false,
        }
    }

    #[test]
    fn ram_goes_on_above_the_hole_in_the_same_file() {
        let ram = GuestRam::create(&config(3073, PageSize::Small)).unwrap();
        assert_eq!(ram.memory().iter().count(), 2);
        let high = GuestAddress(layout::HIGH_RAM);
        ram.memory().write_obj(0x1122_3344_u32, high).unwrap();
        let mut bytes = [0; 4];
        std::os::unix::fs::FileExt::read_exact_at(ram.file(), &mut bytes, layout::LOW_RAM_END)
            .unwrap();
        assert_eq!(u32::from_le_bytes(bytes), 0x1122_3344);
        assert!(
            ram.memory()
                .write_obj(0u8, GuestAddress(layout::MMIO_START))
                .is_err()
        );
    }

    #[test]
    fn impossible_sizes_are_refused() {
        for size in [0, 63, (layout::MAX_RAM >> 20) as u32 + 1] {
            let error = GuestRam::create(&config(size, PageSize::Small)).unwrap_err();
            assert!(matches!(error, MemoryError::Size { .. }), "{error}");
        }
        let error = GuestRam::create(&config(65, PageSize::Huge2M)).unwrap_err();
        assert!(
            matches!(error, MemoryError::NotWholePages { .. }),
            "{error}"
        );
    }

    #[test]
    fn missing_huge_pages_are_a_sentence_with_a_hint() {
        // More than any host this runs on has in its pool.
        let error = GuestRam::create(&config(400 << 10, PageSize::Huge2M)).unwrap_err();
        assert!(
            matches!(
                error,
                MemoryError::TooFewHugePages { .. } | MemoryError::NoHugePages { .. }
            ),
            "{error}"
        );
        assert!(error.hint().is_some());
    }

    #[test]
    fn prefault_touches_every_page() {
        let ram = GuestRam::create(&Memory {
            prefault: true,
            ..config(64, PageSize::Small)
        })
        .unwrap();
        let blocks = std::os::unix::fs::MetadataExt::blocks(&ram.file().metadata().unwrap());
        assert_eq!(blocks * 512, 64 << 20);
    }
}
