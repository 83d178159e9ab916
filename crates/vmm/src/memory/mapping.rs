//! RAM as it is mapped in this process: addresses, and the system calls that change the
//! mapping. [`super::contents`] decides what is mapped where.
#![allow(unsafe_code)] // mmap, munmap, madvise, KVM's slots.

use super::MemoryError;
use super::layers::{Layer, Segment, visible};
use crate::layout;
use jiffy_devices::GuestMemory;
use jiffy_sys::memfd::Pages;
use jiffy_wire::vmm::Extent;
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use rustix::mm::Advice;
use std::fs::File;
use std::io;
use std::sync::Arc;
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap, MmapRegion,
};

/// The mapping of RAM in this process.
#[derive(Debug)]
pub(super) struct Mapping {
    pub(super) memory: Arc<GuestMemory>,
    /// Bytes.
    pub(super) size: u64,
    pub(super) pages: Pages,
}

impl Mapping {
    /// Maps a file with these flags of mmap(2).
    pub(super) fn new(
        file: &Arc<File>,
        size: u64,
        pages: Pages,
        flags: i32,
    ) -> Result<Mapping, MemoryError> {
        let mut offset = 0;
        let mut regions = Vec::with_capacity(2);
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
        Ok(Mapping {
            memory: Arc::new(memory),
            size,
            pages,
        })
    }

    /// The range of all of RAM.
    pub(super) fn whole(&self) -> Extent {
        whole(self.size)
    }

    /// Unmaps RAM and maps the visible parts of the layers, from the lowest address up. This
    /// is less work than [`map_over`](Mapping::map_over) for each layer, for which the
    /// kernel has to split the mapping below.
    ///
    /// # Errors
    ///
    /// `AlreadyExists` if another thread has mapped something at an address meanwhile.
    pub(super) fn map_in_order(&self, layers: &[Layer]) -> io::Result<()> {
        use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE | MapFlags::NORESERVE;
        let segments = visible(layers);
        for (address, _, length) in self.host_parts(self.whole()) {
            // SAFETY: our own mapping, which no other code refers to yet.
            unsafe { munmap(address.cast(), length as usize) }?;
        }
        for Segment { extent, layer } in segments {
            let file = &layers[layer].file;
            for (address, offset, length) in self.host_parts(extent) {
                let (address, length) = (address.cast(), length as usize);
                // SAFETY: replaces nothing. The new mapping is RAM, which only the guest and
                // volatile accesses use.
                let at = unsafe { mmap(address, length, protection, flags, file, offset) }?;
                if at != address {
                    // Linux before 4.17 ignores MAP_FIXED_NOREPLACE: the address is a hint.
                    // SAFETY: just mapped, and used by no other code.
                    unsafe { munmap(at, length) }?;
                    return Err(io::ErrorKind::AlreadyExists.into());
                }
            }
        }
        Ok(())
    }

    /// Registers the memory with KVM, one slot per range.
    pub(super) fn give_to(&self, vm: &VmFd, flags: u32) -> Result<(), kvm_ioctls::Error> {
        for (slot, region) in (0..).zip(self.memory.iter()) {
            let slot = kvm_userspace_memory_region {
                slot,
                flags,
                guest_phys_addr: region.start_addr().0,
                memory_size: region.len(),
                userspace_addr: region.as_ptr() as u64,
            };
            // SAFETY: the range is a mapping of exactly this size, which only
            // the guest and volatile accesses use, and which outlives the VM.
            unsafe { vm.set_user_memory_region(slot) }?;
        }
        Ok(())
    }

    /// Guest physical ranges of a range of the files: `(address, length)`.
    pub(super) fn guest_parts(&self, extent: Extent) -> impl Iterator<Item = (u64, u64)> + '_ {
        layout::ram_ranges(self.size)
            .into_iter()
            .scan(0, |begin, (start, length)| {
                let first = *begin;
                *begin += length;
                Some((first, start, length))
            })
            .filter_map(move |(first, start, length)| {
                let from = extent.offset.max(first);
                let to = extent
                    .offset
                    .saturating_add(extent.length)
                    .min(first + length);
                (from < to).then(|| (start + (from - first), to - from))
            })
    }

    /// Offset in the files of a range of guest physical memory; `None` if part of it is not RAM.
    pub(super) fn offset_of(&self, start: GuestAddress, length: u64) -> Option<u64> {
        let mut offset = 0;
        for region in self.memory.iter() {
            let first = region.start_addr().0;
            if start.0 >= first && start.0 - first < region.len() {
                let inside = start.0 - first;
                let fits = length > 0 && length <= region.len() - inside;
                return fits.then_some(offset + inside);
            }
            offset += region.len();
        }
        None
    }

    /// The parts of a range of the files, as host addresses: `(address,
    /// offset, length)`.
    pub(super) fn host_parts(
        &self,
        extent: Extent,
    ) -> impl Iterator<Item = (*mut u8, u64, u64)> + '_ {
        let (from, to) = (extent.offset, extent.offset + extent.length);
        let mut begin = 0;
        self.memory.iter().filter_map(move |region| {
            let (first, last) = (begin, begin + region.len());
            begin = last;
            let (start, end) = (from.max(first), to.min(last));
            // The offset is in range, because the region is that long.
            (start < end).then(|| {
                (
                    region.as_ptr().wrapping_add((start - first) as usize),
                    start,
                    end - start,
                )
            })
        })
    }

    /// Maps `file`, or zeros, privately over a range.
    pub(super) fn map_over(&self, extent: Extent, file: Option<&File>) -> io::Result<()> {
        use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous};
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        for (address, offset, length) in self.host_parts(extent) {
            // SAFETY: the range is in our own mapping, which only the guest and volatile accesses
            // use; it stays mapped, readable and writable. The new bytes are the current ones, or
            // the guest has declared that it does not need them.
            unsafe {
                match file {
                    Some(file) => mmap(
                        address.cast(),
                        length as usize,
                        protection,
                        flags,
                        file,
                        offset,
                    ),
                    None => mmap_anonymous(address.cast(), length as usize, protection, flags),
                }
            }?;
        }
        Ok(())
    }

    /// Calls madvise(2) for a range. Some kinds of advice change its bytes.
    pub(super) fn advise(&self, extent: Extent, advice: Advice) -> io::Result<()> {
        for (address, _, length) in self.host_parts(extent) {
            // SAFETY: the range is in our own mapping, which stays. Its bytes change only with
            // `LinuxRemove` and `LinuxDontNeed`, for memory that the guest has declared it does not
            // need; nothing else refers to them.
            unsafe { rustix::mm::madvise(address.cast(), length as usize, advice) }?;
        }
        Ok(())
    }
}

/// The range of all of RAM of this size.
pub(super) fn whole(size: u64) -> Extent {
    Extent {
        offset: 0,
        length: size,
    }
}
