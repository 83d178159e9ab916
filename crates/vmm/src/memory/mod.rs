//! Guest RAM: files that are mapped and registered with KVM.
//!
//! * `mapping`: the mapping of RAM in this process.
//! * `ahead`: RAM that is made before the VM is known.
//! * `contents`: which file holds which bytes; what was written, released and frozen.
//! * [`layers`]: RAM as a stack of files.
//!
//! A booted VM writes to its one file, a memfd that is mapped shared. Freezing maps the file
//! privately instead, at the same addresses: later writes of the VM are its own, and other VMs may
//! map the file too. The next freeze copies just the written pages into a further layer.

mod ahead;
mod contents;
mod error;
pub mod layers;
mod mapping;

use crate::layout;
pub use ahead::RamAhead;
pub use contents::Frozen;
use contents::{Contents, Mapped};
pub use error::MemoryError;
use jiffy_devices::GuestMemory;
use jiffy_devices::virtio::balloon::Reclaim;
use jiffy_sys::memfd::{self, Pages};
use jiffy_sys::mutex::lock;
use jiffy_sys::userfaultfd::Userfaultfd;
use jiffy_wire::pager::Mapping as PagerMapping;
use jiffy_wire::vmm::{Extent, Memory, PageSize};
use kvm_ioctls::VmFd;
use layers::{Layer, Segment, visible};
use mapping::{Mapping, whole};
use rustix::mm::Advice;
use std::fs::{self, File};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use vm_memory::GuestAddress;

/// Most bytes copied before a restored VM runs.
const COPY_AHEAD_MAX: u64 = 64 << 20;
/// Name of RAM's memfd.
const NAME: &str = "jiffy guest RAM";

/// Guest RAM.
#[derive(Debug)]
pub struct GuestRam {
    mapping: Mapping,
    contents: Mutex<Contents>,
}

impl GuestRam {
    /// Creates RAM as configured. Huge pages are reserved here, so that the guest never
    /// faults on a missing one.
    ///
    /// # Errors
    ///
    /// If the size is not possible, or the host does not have the memory.
    pub fn create(config: &Memory) -> Result<GuestRam, MemoryError> {
        GuestRam::create_in(config, None)
    }

    /// Creates RAM as configured, if possible in a file that was made ahead ([`RamAhead`]).
    ///
    /// # Errors
    ///
    /// As for [`create`](GuestRam::create).
    pub fn create_in(config: &Memory, ahead: Option<File>) -> Result<GuestRam, MemoryError> {
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
        let file = match ahead.filter(|_| pages == Pages::Small) {
            Some(file) => file.set_len(size).map(|()| file),
            None => memfd::create(NAME, size, pages),
        };
        let ram = GuestRam::map_memfd(file.map_err(MemoryError::Create)?, size, pages)?;
        if pages == Pages::Small {
            ram.allow_huge_pages();
        }
        if config.prefault {
            ram.prefault().map_err(MemoryError::Prefault)?;
        }
        Ok(ram)
    }

    /// RAM in a memfd of this size.
    fn map_memfd(file: File, size: u64, pages: Pages) -> Result<GuestRam, MemoryError> {
        // Shared, so that the file is the memory. Small pages are allocated when they are touched;
        // huge ones are reserved from their pool now.
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

    /// Captured RAM of `size` bytes: its layers, which are never written to. Nothing is read now.
    ///
    /// # Errors
    ///
    /// If mmap(2) of a layer fails.
    pub fn from_layers(layers: Vec<Layer>, size: u64) -> Result<GuestRam, MemoryError> {
        let flags = libc::MAP_PRIVATE | libc::MAP_NORESERVE;
        if let [_] = layers.as_slice() {
            let ram = GuestRam::map(layers, Mapped::Privately, size, Pages::Small, flags)?;
            ram.allow_huge_pages();
            return Ok(ram);
        }
        let ram = GuestRam::map(layers.clone(), Mapped::Privately, size, Pages::Small, flags)?;
        match ram.mapping.map_in_order(&layers) {
            Ok(()) => Ok(ram),
            Err(error) => {
                // Another mapping may be at its addresses now, so nothing may be unmapped. Nothing
                // refers to them.
                std::mem::forget(ram);
                match error.kind() {
                    io::ErrorKind::AlreadyExists => GuestRam::laid_over(layers, size),
                    _ => Err(MemoryError::MapSaved(error)),
                }
            }
        }
    }

    /// Captured RAM, each layer mapped over those below it.
    fn laid_over(layers: Vec<Layer>, size: u64) -> Result<GuestRam, MemoryError> {
        let flags = libc::MAP_PRIVATE | libc::MAP_NORESERVE;
        let ram = GuestRam::map(layers.clone(), Mapped::Privately, size, Pages::Small, flags)?;
        for Segment { extent, layer } in visible(&layers) {
            if layer > 0 {
                ram.mapping
                    .map_over(extent, Some(&layers[layer].file))
                    .map_err(MemoryError::MapSaved)?;
            }
        }
        Ok(ram)
    }

    /// Maps the lowest layer.
    fn map(
        layers: Vec<Layer>,
        mapped: Mapped,
        size: u64,
        pages: Pages,
        flags: i32,
    ) -> Result<GuestRam, MemoryError> {
        Ok(GuestRam {
            mapping: Mapping::new(&layers[0].file, size, pages, flags)?,
            contents: Mutex::new(Contents::new(layers, mapped)),
        })
    }

    /// The mapped memory, for devices and loaders.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.mapping.memory
    }

    /// Bytes of RAM.
    pub fn size(&self) -> u64 {
        self.mapping.size
    }

    /// Registers the memory with KVM, one slot per range. The VM must not outlive it.
    ///
    /// # Errors
    ///
    /// If `KVM_SET_USER_MEMORY_REGION` fails.
    pub fn register(&self, vm: &VmFd) -> Result<(), MemoryError> {
        self.mapping.give_to(vm, 0).map_err(MemoryError::Register)
    }

    /// The guest physical ranges of these ranges of the files: `(address, length)`.
    pub fn guest_parts(&self, extent: Extent) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.mapping.guest_parts(extent)
    }

    /// Allows transparent huge pages where the host offers them for shared memory: one page fault
    /// instead of 512. A file's pages are then also read and mapped in such blocks, if its file
    /// system supports that.
    fn allow_huge_pages(&self) {
        // A kernel without transparent huge pages refuses, which does no harm.
        let _ = self
            .mapping
            .advise(self.mapping.whole(), Advice::LinuxHugepage);
    }

    fn prefault(&self) -> io::Result<()> {
        self.populate(self.mapping.whole())
    }

    /// Populates the ranges with private pages at once, which costs a fraction of the page faults
    /// that they would take one by one. Ranges outside of RAM and beyond [`COPY_AHEAD_MAX`] are
    /// skipped: this only saves time.
    pub fn copy_ahead(&self, extents: &[Extent]) {
        let mut left = COPY_AHEAD_MAX;
        for extent in extents {
            let aligned = (extent.offset | extent.length).is_multiple_of(layers::PAGE);
            let inside = extent
                .offset
                .checked_add(extent.length)
                .is_some_and(|end| end <= self.mapping.size);
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

    /// Reads only pages of mapped files that are accessed, and none around them. Failing to do so
    /// costs only page cache.
    pub fn disable_readahead(&self) {
        for advice in [Advice::LinuxNoHugepage, Advice::Random] {
            // A kernel without transparent huge pages refuses the first.
            let _ = self.mapping.advise(self.mapping.whole(), advice);
        }
    }

    fn populate(&self, extent: Extent) -> io::Result<()> {
        self.mapping.advise(extent, Advice::LinuxPopulateWrite)
    }

    /// RAM of `size` bytes that is untouched, for a pager to fill.
    ///
    /// # Errors
    ///
    /// If memfd_create(2), ftruncate(2) or mmap(2) fails.
    pub fn to_be_paged(size: u64) -> Result<GuestRam, MemoryError> {
        let file = memfd::create(NAME, size, Pages::Small).map_err(MemoryError::Create)?;
        GuestRam::map_memfd(file, size, Pages::Small)
    }

    /// Maps these ranges privately from a file as long as RAM that other VMs map, too; the pager
    /// need not fill them.
    ///
    /// # Errors
    ///
    /// If the file or the ranges do not fit RAM, or can't be mapped.
    pub fn share(&self, file: File, covers: Vec<Extent>) -> Result<(), MemoryError> {
        let layer = Layer::new(file, covers, self.mapping.size)?;
        self.lock()
            .share(&self.mapping, layer)
            .map_err(MemoryError::Share)
    }

    /// Host addresses of all parts that are not [shared](GuestRam::share): `(address, length)`.
    pub fn unshared(&self) -> Vec<(u64, u64)> {
        let own = self.lock().unshared();
        own.into_iter()
            .flat_map(|extent| self.mapping.host_parts(extent))
            .map(|(address, _, length)| (address as u64, length))
            .collect()
    }

    /// Registers all of RAM with `uffd`; returns the mappings for the pager.
    ///
    /// # Errors
    ///
    /// If the kernel refuses a registration.
    #[allow(unsafe_code)] // Memory gets contents that others decide.
    pub fn serve_by(&self, uffd: &Userfaultfd) -> io::Result<Vec<PagerMapping>> {
        let page_size = layers::PAGE;
        self.mapping
            .host_parts(self.mapping.whole())
            .map(|(address, offset, size)| {
                // SAFETY: it is guest RAM, which is only accessed volatilely and may hold anything
                // at any time.
                unsafe { uffd.register(address as u64, size) }?;
                Ok(PagerMapping {
                    base_host_virt_addr: address as u64,
                    size,
                    offset,
                    page_size,
                    page_size_kib: page_size,
                })
            })
            .collect()
    }

    /// Freezes what RAM holds now: the returned files never change. Nothing may write to RAM
    /// meanwhile. The cost depends on what was written since the last time, not on the size.
    ///
    /// # Errors
    ///
    /// If a file can't be made, written or mapped. After [`MemoryError::Freeze`] RAM may be half
    /// frozen, and its VM must end; after any other error nothing has changed.
    pub fn freeze(&self) -> Result<Frozen, MemoryError> {
        self.lock().freeze(&self.mapping)
    }

    /// The ranges of RAM that this VM has written since the last freeze, or since it mapped frozen
    /// memory of another VM. Before the first freeze, all of RAM.
    ///
    /// # Errors
    ///
    /// If the page map of this process or KVM's dirty log can't be read.
    pub fn written(&self) -> io::Result<Vec<Extent>> {
        self.lock().written(&self.mapping)
    }

    /// The same without waiting for the lock: a vCPU that releases memory holds it, and may
    /// be waiting for a pager that is gone.
    ///
    /// # Errors
    ///
    /// `WouldBlock` if the lock is held.
    pub fn written_at_once(&self) -> io::Result<Vec<Extent>> {
        match self.contents.try_lock() {
            Ok(mut contents) => contents.written(&self.mapping),
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner().written(&self.mapping),
            Err(TryLockError::WouldBlock) => Err(io::Error::new(
                io::ErrorKind::WouldBlock,
                "the guest is releasing memory; try again",
            )),
        }
    }

    /// Whether it was captured often enough for KVM's dirty log to pay off.
    pub fn wants_log(&self) -> bool {
        self.lock().wants_log()
    }

    /// Starts KVM's dirty log. KVM write-protects the guest's pages for it, which is better
    /// done while the guest runs than in a capture's pause.
    pub fn keep_log(&self, vm: &Arc<VmFd>) {
        self.lock().keep_log(&self.mapping, vm);
    }

    /// A range of guest RAM in the files.
    fn extent(&self, start: GuestAddress, length: u64) -> io::Result<Extent> {
        let offset = self.mapping.offset_of(start, length);
        let offset = offset.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Extent { offset, length })
    }

    fn lock(&self) -> MutexGuard<'_, Contents> {
        lock(&self.contents)
    }
}

impl Reclaim for GuestRam {
    /// From now on the range reads as zero; it stays unchanged if zeros would need too many
    /// mappings or RAM is in huge pages.
    fn release(&self, start: GuestAddress, length: u64) -> io::Result<()> {
        let extent = self.extent(start, length)?;
        self.lock().release(&self.mapping, extent)
    }

    /// From now on the range reads as zero or as its file's bytes, which this VM or its parent had
    /// there before.
    fn discard(&self, start: GuestAddress, length: u64) -> io::Result<()> {
        let extent = self.extent(start, length)?;
        self.lock().discard(&self.mapping, extent)
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
    use vm_memory::{Bytes, GuestMemoryBackend, GuestMemoryRegion};

    fn config(size_mib: u32, pages: PageSize) -> Memory {
        Memory {
            size_mib,
            pages,
            prefault: false,
        }
    }

    #[test]
    fn ram_above_the_hole_is_in_the_same_file() {
        let ram = GuestRam::create(&config(3073, PageSize::Small)).unwrap();
        assert_eq!(ram.memory().iter().count(), 2);
        let high = GuestAddress(layout::HIGH_RAM);
        ram.memory().write_obj(0x1122_3344_u32, high).unwrap();
        let mut bytes = [0; 4];
        let file = ram.lock().lowest().clone();
        std::os::unix::fs::FileExt::read_exact_at(&*file, &mut bytes, layout::LOW_RAM_END).unwrap();
        assert_eq!(u32::from_le_bytes(bytes), 0x1122_3344);
        assert!(
            ram.memory()
                .write_obj(0u8, GuestAddress(layout::MMIO_START))
                .is_err()
        );
    }

    #[test]
    fn ram_in_a_file_that_was_made_ahead_has_its_own_size_and_zeros() {
        for size_mib in [64, 3073] {
            let config = config(size_mib, PageSize::Small);
            let mut ahead = RamAhead::new().unwrap();
            // A spare may be needed before all is allocated.
            assert!(ahead.allocate_next() && ahead.allocate_next());
            let file = ahead.into_file();
            let ram = GuestRam::create_in(&config, Some(file.try_clone().unwrap())).unwrap();
            assert_eq!(file.metadata().unwrap().len(), u64::from(size_mib) << 20);
            let last = ram.memory().iter().last().unwrap();
            for address in [0, 16 << 20, last.start_addr().0 + last.len() - 8] {
                let address = GuestAddress(address);
                assert_eq!(ram.memory().read_obj::<u64>(address).unwrap(), 0);
                ram.memory().write_obj(1u64, address).unwrap();
            }
        }
    }

    #[test]
    fn a_range_of_ram_that_was_made_ahead_can_be_cleared() {
        let ahead = RamAhead::new().unwrap();
        let (first, second) = (GuestAddress(0x20_0000 - 8), GuestAddress(0x20_0000 + 4096));
        ahead.memory().write_obj([1u64; 32], first).unwrap();
        ahead.memory().write_obj(2u64, second).unwrap();
        // Not of whole pages.
        ahead.clear(0x20_0000 - 8..0x20_0000 + 248).unwrap();
        assert_eq!(
            ahead.memory().read_obj::<[u64; 32]>(first).unwrap(),
            [0; 32]
        );
        assert_eq!(ahead.memory().read_obj::<u64>(second).unwrap(), 2);
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
    fn missing_huge_pages_are_an_error_with_a_hint() {
        // More than the pool of any host that runs this test.
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
    fn unmappable_saved_memory_has_its_own_error() {
        let size = 64 << 20;
        let file = memfd::create("test", size, Pages::Small).unwrap();
        let lowest = Layer {
            file: Arc::new(file),
            covers: vec![whole(size)],
        };
        // The kernel does not map a file that is not open for reading.
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
        let file = ram.lock().lowest().clone();
        let blocks = std::os::unix::fs::MetadataExt::blocks(&file.metadata().unwrap());
        assert_eq!(blocks * 512, 64 << 20);
    }
}
