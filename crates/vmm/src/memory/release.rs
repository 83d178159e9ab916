//! Memory that the guest does not need.

use super::layers::{Segment, within};
use super::{Backing, GuestRam, Mapped};
use jiffy_devices::virtio::balloon::Reclaim;
use jiffy_sys::memfd::Pages;
use jiffy_wire::vmm::Extent;
use rustix::mm::Advice;
use std::io;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

/// Smallest range released of what is mapped privately: each such range is a
/// mapping of its own, and those are counted.
pub(super) const RELEASE_MIN: u64 = 256 << 10;
/// Most such ranges.
pub(super) const RELEASES_MAX: usize = 4096;

impl Reclaim for GuestRam {
    /// From now on the range reads as zero, or, where that would take too many
    /// mappings or RAM is in huge pages, as before.
    fn release(&self, start: GuestAddress, length: u64) -> io::Result<()> {
        let Some(offset) = self.offset_of(start, length) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        // Huge pages are reserved, and the reservation would go with them: the guest's
        // next access may find the pool empty. What was there is an answer, too.
        if self.pages != Pages::Small {
            return Ok(());
        }
        let extent = Extent { offset, length };
        let mut backing = self.lock();
        match backing.mapped {
            Mapped::Shared => {
                for Segment { extent, layer } in within(&backing.layers, extent) {
                    match layer {
                        0 => self.advise(extent, Advice::LinuxRemove)?,
                        _ => self.release_private(&mut backing, extent)?,
                    }
                }
                Ok(())
            }
            Mapped::Privately => self.release_private(&mut backing, extent),
        }
    }
}

impl GuestRam {
    /// Puts zeros over a range of private mappings. Without them it would have
    /// the bytes of its file again, which are neither zero nor what was there.
    fn release_private(&self, backing: &mut Backing, extent: Extent) -> io::Result<()> {
        if extent.length < RELEASE_MIN || backing.released.len() + backing.cuts >= RELEASES_MAX {
            return Ok(());
        }
        self.map_over(extent, None)?;
        backing.released.push(extent);
        Ok(())
    }

    /// Where a range of guest memory lies in the files; none if it is not all
    /// RAM.
    fn offset_of(&self, start: GuestAddress, length: u64) -> Option<u64> {
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::Bytes;

    #[test]
    fn huge_pages_stay_where_they_are_reserved() {
        // Of a host that need not have any.
        let mut ram = GuestRam::to_be_paged(64 << 20).unwrap();
        ram.pages = Pages::Huge2M;
        let start = GuestAddress(2 << 20);
        ram.memory().write_obj(7u64, start).unwrap();
        ram.release(start, 2 << 20).unwrap();
        assert_eq!(ram.memory().read_obj::<u64>(start).unwrap(), 7);
        assert!(ram.release(GuestAddress(63 << 20), 2 << 20).is_err());
        ram.pages = Pages::Small;
        ram.release(start, 2 << 20).unwrap();
        assert_eq!(ram.memory().read_obj::<u64>(start).unwrap(), 0);
    }
}
