//! Guest RAM: files, mapped, and registered with KVM.
//!
//! * [`layers`]: RAM as a stack of files.
//! * [`freeze`](GuestRam::freeze): from now on the files never change.
//! * [`written`](GuestRam::written): what has changed since.
//! * [`GuestRam::share`]: a part of RAM that a pager has in memory for many VMs.
//! * [`Reclaim`](jiffy_devices::virtio::balloon::Reclaim): memory the guest does not need.
//!
//! A booted VM writes into its one file, a memfd mapped shared. Freezing maps
//! the file privately instead, over the same addresses: what the VM writes from
//! then on is its own, and others may map the file too. The next freeze copies
//! just those pages into a further layer.

mod error;
mod freeze;
pub mod layers;
mod release;
mod written;

use crate::layout;
pub use error::MemoryError;
pub use freeze::Frozen;
use jiffy_devices::GuestMemory;
use jiffy_sys::memfd::{self, Pages};
use jiffy_sys::userfaultfd::Userfaultfd;
use jiffy_wire::pager::Mapping;
use jiffy_wire::vmm::{Extent, Memory, PageSize};
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use layers::{Layer, Segment, visible};
use rustix::mm::Advice;
use std::fs::{self, File};
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap, MmapRegion,
};
use written::Tracking;

/// Most bytes copied before a restored VM runs.
const COPY_AHEAD_MAX: u64 = 64 << 20;

/// Guest RAM.
#[derive(Debug)]
pub struct GuestRam {
    memory: Arc<GuestMemory>,
    size: u64,
    pages: Pages,
    backing: Mutex<Backing>,
}

/// What is behind the mapping.
#[derive(Debug)]
struct Backing {
    /// Lowest first.
    layers: Vec<Layer>,
    mapped: Mapped,
    /// Ranges that the guest gave back since the last freeze: zero, whatever
    /// the layers say.
    released: Vec<Extent>,
    /// Ranges mapped apart from their surroundings that no layer tells of.
    cuts: usize,
    tracking: Tracking,
}

/// How the layers are mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mapped {
    /// The lowest layer shared: that file is the memory. What a pager shares
    /// with others is a layer above it, mapped privately.
    Shared,
    /// Privately: written pages are this process's own.
    Privately,
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
        let ram = GuestRam::empty(size, pages)?;
        if config.prefault {
            ram.prefault().map_err(MemoryError::Prefault)?;
        }
        Ok(ram)
    }

    /// RAM all zero, in a memfd.
    fn empty(size: u64, pages: Pages) -> Result<GuestRam, MemoryError> {
        let ram = GuestRam::map_memfd(size, pages)?;
        if pages == Pages::Small {
            ram.allow_huge_pages();
        }
        Ok(ram)
    }

    fn map_memfd(size: u64, pages: Pages) -> Result<GuestRam, MemoryError> {
        let file = memfd::create("jiffy guest RAM", size, pages).map_err(MemoryError::Create)?;
        // Shared, so that the file is the memory. Small pages are allocated
        // when touched; huge ones are reserved from their pool now.
        let flags = libc::MAP_SHARED
            | match pages {
                Pages::Small => libc::MAP_NORESERVE,
                _ => 0,
            };
        let layer = Layer {
            file: Arc::new(file),
            covers: vec![whole(size)],
        };
        GuestRam::map(vec![layer], Mapped::Shared, size, pages, flags)
    }

    /// RAM as it was captured: the layers, which are never written to.
    /// Nothing is read now.
    pub fn from_layers(layers: Vec<Layer>, size: u64) -> Result<GuestRam, MemoryError> {
        let flags = libc::MAP_PRIVATE | libc::MAP_NORESERVE;
        if let [_] = layers.as_slice() {
            let ram = GuestRam::map(layers, Mapped::Privately, size, Pages::Small, flags)?;
            ram.allow_huge_pages();
            return Ok(ram);
        }
        let ram = GuestRam::map(layers.clone(), Mapped::Privately, size, Pages::Small, flags)?;
        match ram.map_in_order() {
            Ok(()) => Ok(ram),
            Err(error) => {
                // Whose its addresses are now is not known: they stay as they
                // are. Nothing refers to them.
                std::mem::forget(ram);
                match error.kind() {
                    io::ErrorKind::AlreadyExists => GuestRam::laid_over(layers, size),
                    _ => Err(MemoryError::MapSaved(error)),
                }
            }
        }
    }

    /// RAM as it was captured, each layer put over those below it.
    fn laid_over(layers: Vec<Layer>, size: u64) -> Result<GuestRam, MemoryError> {
        let flags = libc::MAP_PRIVATE | libc::MAP_NORESERVE;
        let ram = GuestRam::map(layers, Mapped::Privately, size, Pages::Small, flags)?;
        let backing = ram.lock();
        for Segment { extent, layer } in visible(&backing.layers) {
            if layer > 0 {
                ram.map_over(extent, Some(&backing.layers[layer].file))
                    .map_err(MemoryError::MapSaved)?;
            }
        }
        drop(backing);
        Ok(ram)
    }

    /// Maps what is to be seen of the layers anew, from the lowest address up
    /// and where nothing is mapped any more: less work than
    /// [`laid_over`](GuestRam::laid_over), for which the kernel cuts each piece
    /// out of the layer below. `AlreadyExists` if another thread of this
    /// process has mapped something there meanwhile.
    #[allow(unsafe_code)] // munmap and mmap
    fn map_in_order(&self) -> io::Result<()> {
        use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE | MapFlags::NORESERVE;
        let backing = self.lock();
        let segments = visible(&backing.layers);
        for (address, _, length) in self.host_parts(whole(self.size)) {
            // SAFETY: our own mapping, which nobody but us knows of yet.
            unsafe { munmap(address.cast(), length as usize) }?;
        }
        for Segment { extent, layer } in segments {
            let file = &backing.layers[layer].file;
            for (address, offset, length) in self.host_parts(extent) {
                let (address, length) = (address.cast(), length as usize);
                // SAFETY: replaces nothing. What is put there is RAM, which
                // only the guest and volatile accesses will use.
                let at = unsafe { mmap(address, length, protection, flags, file, offset) }?;
                if at != address {
                    // Linux before 4.17 takes the address for a wish.
                    // SAFETY: just mapped, and nobody else's.
                    unsafe { munmap(at, length) }?;
                    return Err(io::ErrorKind::AlreadyExists.into());
                }
            }
        }
        Ok(())
    }

    /// Maps the lowest layer.
    fn map(
        layers: Vec<Layer>,
        mapped: Mapped,
        size: u64,
        pages: Pages,
        flags: i32,
    ) -> Result<GuestRam, MemoryError> {
        let mut offset = 0;
        let mut regions = Vec::with_capacity(2);
        for (start, length) in layout::ram_ranges(size) {
            let mapping = MmapRegion::build(
                Some(FileOffset::from_arc(layers[0].file.clone(), offset)),
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
        Ok(GuestRam {
            memory: Arc::new(memory),
            size,
            pages,
            backing: Mutex::new(Backing {
                layers,
                mapped,
                released: Vec::new(),
                cuts: 0,
                tracking: Tracking::default(),
            }),
        })
    }

    /// The mapping, for devices and loaders.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Bytes of RAM.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Gives the memory to KVM, one slot a range. The VM must not outlive it.
    pub fn register(&self, vm: &VmFd) -> Result<(), MemoryError> {
        self.give_to(vm, 0).map_err(MemoryError::Register)
    }

    #[allow(unsafe_code)] // KVM keeps the host addresses.
    fn give_to(&self, vm: &VmFd, flags: u32) -> Result<(), kvm_ioctls::Error> {
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

    /// Lets the kernel back it with transparent huge pages, where the host
    /// offers them for shared memory: one fault instead of 512. A file's pages
    /// are then also read and mapped in such blocks, where its file system can.
    fn allow_huge_pages(&self) {
        // A kernel without transparent huge pages refuses, which is fine.
        let _ = self.advise(whole(self.size), Advice::LinuxHugepage);
    }

    fn prefault(&self) -> io::Result<()> {
        self.populate(whole(self.size))
    }

    /// Gives the ranges pages of their own now, which costs a fraction of the
    /// faults they would take one by one. Those that are not RAM are left out,
    /// and so is what goes beyond a sane amount: this is only about time.
    pub fn copy_ahead(&self, extents: &[Extent]) {
        let mut left = COPY_AHEAD_MAX;
        for extent in extents {
            let aligned = (extent.offset | extent.length).is_multiple_of(layers::PAGE);
            let inside = extent
                .offset
                .checked_add(extent.length)
                .is_some_and(|end| end <= self.size);
            if !aligned || !inside || extent.length > left {
                continue;
            }
            left -= extent.length;
            if let Err(error) = self.populate(*extent) {
                tracing::debug!(%error, "pages could not be copied ahead");
                return;
            }
        }
    }

    fn populate(&self, extent: Extent) -> io::Result<()> {
        self.advise(extent, Advice::LinuxPopulateWrite)
    }

    /// Where these ranges of the files are in the guest: `(address, length)`.
    pub fn guest_parts(&self, extent: Extent) -> impl Iterator<Item = (u64, u64)> + '_ {
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

    /// RAM still untouched, for a pager to fill.
    pub fn to_be_paged(size: u64) -> Result<GuestRam, MemoryError> {
        GuestRam::map_memfd(size, Pages::Small)
    }

    /// Maps these ranges privately of a file as long as RAM, which others map,
    /// too, instead of having them filled.
    pub fn share(&self, file: File, covers: Vec<Extent>) -> Result<(), MemoryError> {
        let layer = Layer::new(file, covers, self.size)?;
        let mut backing = self.lock();
        debug_assert!(backing.mapped == Mapped::Shared && backing.layers.len() == 1);
        for extent in &layer.covers {
            self.map_over(*extent, Some(&layer.file))
                .map_err(MemoryError::Share)?;
        }
        backing.layers.push(layer);
        Ok(())
    }

    /// The parts of memory that are one's own, as host addresses: all but those
    /// of [`share`](GuestRam::share). `(address, length)`
    pub fn unshared(&self) -> Vec<(u64, u64)> {
        let segments = visible(&self.lock().layers);
        let lowest = segments.into_iter().filter(|segment| segment.layer == 0);
        lowest
            .flat_map(|segment| self.host_parts(segment.extent))
            .map(|(address, _, length)| (address as u64, length))
            .collect()
    }

    /// Lets `uffd` serve all of it; returns what the pager is to be told.
    #[allow(unsafe_code)] // Memory gets contents that others decide.
    pub fn serve_by(&self, uffd: &Userfaultfd) -> io::Result<Vec<Mapping>> {
        let page_size = layers::PAGE;
        self.host_parts(whole(self.size))
            .map(|(address, offset, size)| {
                // SAFETY: it is guest RAM, of which only volatile accesses are
                // made, and which may hold anything at any time.
                unsafe { uffd.register(address as u64, size) }?;
                Ok(Mapping {
                    base_host_virt_addr: address as u64,
                    size,
                    offset,
                    page_size,
                    page_size_kib: page_size,
                })
            })
            .collect()
    }

    /// The parts of a range of the files, as host addresses: `(address,
    /// offset, length)`.
    fn host_parts(&self, extent: Extent) -> impl Iterator<Item = (*mut u8, u64, u64)> + '_ {
        let (from, to) = (extent.offset, extent.offset + extent.length);
        let mut begin = 0;
        self.memory.iter().filter_map(move |region| {
            let (first, last) = (begin, begin + region.len());
            begin = last;
            let (start, end) = (from.max(first), to.min(last));
            // In range: the region is that long.
            (start < end).then(|| {
                (
                    region.as_ptr().wrapping_add((start - first) as usize),
                    start,
                    end - start,
                )
            })
        })
    }

    /// Puts a private mapping of `file`, or of zeros, over a range.
    #[allow(unsafe_code)] // mmap
    fn map_over(&self, extent: Extent, file: Option<&File>) -> io::Result<()> {
        use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous};
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        for (address, offset, length) in self.host_parts(extent) {
            // SAFETY: the range lies in our own mapping, which only the guest
            // and volatile accesses use; it stays mapped, readable and
            // writable. The new bytes are those that are there, or the guest
            // has said that it does not need them.
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

    /// One of the uses above: which bytes it changes is for the caller to know.
    #[allow(unsafe_code)] // madvise
    fn advise(&self, extent: Extent, advice: Advice) -> io::Result<()> {
        for (address, _, length) in self.host_parts(extent) {
            // SAFETY: the range lies in our own mapping, which stays as it is.
            // Its bytes change only with `LinuxRemove`, of memory that the guest
            // has said it does not need; nothing else refers to them.
            unsafe { rustix::mm::madvise(address.cast(), length as usize, advice) }?;
        }
        Ok(())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Backing> {
        self.backing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn whole(size: u64) -> Extent {
    Extent {
        offset: 0,
        length: size,
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
        let file = ram.lock().layers[0].file.clone();
        std::os::unix::fs::FileExt::read_exact_at(&*file, &mut bytes, layout::LOW_RAM_END).unwrap();
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
    fn saved_memory_that_cannot_be_mapped_is_told_as_such() {
        let size = 64 << 20;
        let file = memfd::create("test", size, Pages::Small).unwrap();
        let lowest = Layer {
            file: Arc::new(file),
            covers: vec![whole(size)],
        };
        // The kernel maps no file that can't be read.
        let folder = tempfile::tempdir().unwrap();
        let file = File::create(folder.path().join("layer")).unwrap();
        file.set_len(size).unwrap();
        let covers = vec![Extent {
            offset: layers::PAGE,
            length: layers::PAGE,
        }];
        let upper = Layer::new(file, covers, size).unwrap();
        let error = GuestRam::from_layers(vec![lowest, upper], size).unwrap_err();
        assert!(matches!(error, MemoryError::MapSaved(_)), "{error}");
        let full = MemoryError::MapSaved(io::Error::from_raw_os_error(libc::ENOMEM));
        assert!(full.hint().unwrap().contains("vm.max_map_count"));
    }

    #[test]
    fn prefault_touches_every_page() {
        let ram = GuestRam::create(&Memory {
            prefault: true,
            ..config(64, PageSize::Small)
        })
        .unwrap();
        let file = ram.lock().layers[0].file.clone();
        let blocks = std::os::unix::fs::MetadataExt::blocks(&file.metadata().unwrap());
        assert_eq!(blocks * 512, 64 << 20);
    }
}
