//! Releases memory that the guest does not need.

use super::{Contents, Mapped};
use crate::memory::layers::{Segment, within};
use crate::memory::mapping::Mapping;
use jiffy_sys::memfd::Pages;
use jiffy_wire::vmm::Extent;
use rustix::mm::Advice;
use std::io;

/// Smallest range that is released of private mappings, bytes: each such range becomes a mapping of
/// its own, and their number is limited.
pub(super) const RELEASE_MIN: u64 = 256 << 10;
/// Most such ranges.
pub(super) const RELEASES_MAX: usize = 4096;

impl Contents {
    /// From now on the range reads as zero; it stays unchanged if zeros would need too many
    /// mappings or RAM is in huge pages.
    pub(in crate::memory) fn release(
        &mut self,
        mapping: &Mapping,
        extent: Extent,
    ) -> io::Result<()> {
        // Huge pages are reserved, and releasing them would release the reservation: the guest's
        // next access may find the pool empty. The guest accepts unchanged memory, too.
        if mapping.pages != Pages::Small {
            return Ok(());
        }
        match self.mapped {
            Mapped::Shared => {
                for Segment { extent, layer } in within(&self.layers, extent) {
                    match layer {
                        0 => mapping.advise(extent, Advice::LinuxRemove)?,
                        _ => _ = self.release_private(mapping, extent)?,
                    }
                }
            }
            Mapped::Privately => _ = self.release_private(mapping, extent)?,
        }
        Ok(())
    }

    /// As [`Contents::release`], but the range may show the bytes of its file again, so that all of
    /// the VM's own pages in it are released.
    pub(in crate::memory) fn discard(
        &mut self,
        mapping: &Mapping,
        extent: Extent,
    ) -> io::Result<()> {
        match self.mapped {
            Mapped::Privately if mapping.pages == Pages::Small => {
                if !self.release_private(mapping, extent)? {
                    mapping.advise(extent, Advice::LinuxDontNeed)?;
                }
                Ok(())
            }
            _ => self.release(mapping, extent),
        }
    }

    /// Maps zeros over a range of private mappings, unless that needs too many. Otherwise the range
    /// would show the bytes of its file again, which are neither zero nor the last contents.
    fn release_private(&mut self, mapping: &Mapping, extent: Extent) -> io::Result<bool> {
        if extent.length < RELEASE_MIN || self.released.len() + self.cuts >= RELEASES_MAX {
            return Ok(false);
        }
        mapping.map_over(extent, None)?;
        self.released.push(extent);
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::GuestRam;
    use jiffy_devices::virtio::balloon::Reclaim;
    use vm_memory::{Bytes, GuestAddress};

    #[test]
    fn reserved_huge_pages_are_not_released() {
        // Pretends to be on a host with huge pages, so that the test needs none.
        let mut ram = GuestRam::to_be_paged(64 << 20).unwrap();
        ram.mapping.pages = Pages::Huge2M;
        let start = GuestAddress(2 << 20);
        ram.memory().write_obj(7u64, start).unwrap();
        ram.release(start, 2 << 20).unwrap();
        assert_eq!(ram.memory().read_obj::<u64>(start).unwrap(), 7);
        assert!(ram.release(GuestAddress(63 << 20), 2 << 20).is_err());
        ram.mapping.pages = Pages::Small;
        ram.release(start, 2 << 20).unwrap();
        assert_eq!(ram.memory().read_obj::<u64>(start).unwrap(), 0);
    }

    #[test]
    fn discarded_memory_of_a_captured_vm_is_released_in_any_size() {
        let ram = GuestRam::to_be_paged(64 << 20).unwrap();
        let [small, large] = [1 << 20, 2 << 20].map(GuestAddress);
        let write = |value: u64| {
            for start in [small, large] {
                ram.memory().write_obj(value, start).unwrap();
            }
        };
        let own_pages = || {
            let written = ram.written().unwrap();
            written.iter().map(|extent| extent.length).sum::<u64>()
        };
        write(7);
        ram.freeze().unwrap();
        write(8);
        assert!(own_pages() > 0);
        // Less than a mapping of its own is worth.
        ram.release(small, 4096).unwrap();
        assert_eq!(ram.memory().read_obj::<u64>(small).unwrap(), 8);
        ram.discard(small, 4096).unwrap();
        ram.discard(large, RELEASE_MIN).unwrap();
        assert_eq!(ram.memory().read_obj::<u64>(small).unwrap(), 7);
        assert_eq!(ram.memory().read_obj::<u64>(large).unwrap(), 0);
        // What the guest sees is what is captured.
        let frozen = ram.freeze().unwrap();
        let files = frozen.files.iter().map(|file| file.try_clone().unwrap());
        let layout = Some(frozen.layout.clone());
        let layers = crate::memory::layers::assemble(files.collect(), layout, 64 << 20).unwrap();
        let child = GuestRam::from_layers(layers, 64 << 20).unwrap();
        let read = |start| child.memory().read_obj::<u64>(start).unwrap();
        assert_eq!((read(small), read(large)), (7, 0));
        assert!(ram.discard(GuestAddress(63 << 20), 2 << 20).is_err());
    }
}
