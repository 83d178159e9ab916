//! Where guest memory is mapped, looked up once for many segments.

use super::request::Segment;
use crate::GuestMemory;
use vm_memory::{GuestAddress, GuestMemoryBackend as _, GuestMemoryRegion as _};

/// A region of guest memory: that of the last segment, in which the next one
/// is likely to be too.
pub(super) struct Region {
    start: u64,
    end: u64,
    place: *mut u8,
}

impl Default for Region {
    /// An empty one.
    fn default() -> Region {
        Region {
            start: 0,
            end: 0,
            place: std::ptr::null_mut(),
        }
    }
}

impl Region {
    /// The one that holds an address; an empty one if none does.
    pub(super) fn of(memory: &GuestMemory, address: GuestAddress) -> Region {
        let Some(region) = memory.find_region(address) else {
            return Region::default();
        };
        Region {
            start: region.start_addr().0,
            end: region.start_addr().0.saturating_add(region.len()),
            place: region.as_ptr(),
        }
    }

    /// Where a segment is that lies wholly in it.
    pub(super) fn place_of(&self, segment: &Segment) -> Option<*mut u8> {
        let start = segment.address.0;
        let end = start.checked_add(segment.length as u64)?;
        (self.start <= start && end <= self.end)
            .then(|| self.place.wrapping_byte_add((start - self.start) as usize))
    }

    /// Is all of a segment in guest memory? This becomes the region in which it
    /// begins.
    pub(super) fn reaches(&mut self, memory: &GuestMemory, segment: &Segment) -> bool {
        if self.place_of(segment).is_some() {
            return true;
        }
        *self = Region::of(memory, segment.address);
        // It may go on in the next one.
        memory.check_range(segment.address, segment.length)
    }
}
