//! Checked runs of guest memory, and their host addresses: looked up once for many runs.

use crate::GuestMemory;
use crate::write_log::WriteLog;
use vm_memory::bitmap::BS;
use vm_memory::{
    Address as _, Bytes as _, GuestAddress, GuestMemoryBackend as _, GuestMemoryRegion as _,
    VolatileSlice,
};

/// A run of guest memory that was checked to exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) address: GuestAddress,
    /// Bytes.
    pub(crate) length: usize,
}

/// Bytes of segments. Those of one chain have less than 4 GiB, which `Walk` checks.
pub(crate) fn length(segments: &[Segment]) -> usize {
    segments.iter().map(|segment| segment.length).sum()
}

/// The part of a list of segments from byte `offset` on: `length` bytes, or as many as there are.
pub(crate) fn part(
    segments: &[Segment],
    offset: usize,
    length: usize,
) -> impl Iterator<Item = Segment> + Clone {
    let (mut skip, mut left) = (offset, length);
    let parts = segments.iter().map_while(move |segment| {
        if left == 0 {
            return None;
        }
        let start = skip.min(segment.length);
        skip -= start;
        let length = left.min(segment.length - start);
        left -= length;
        let address = GuestAddress(segment.address.0 + start as u64);
        Some(Segment { address, length })
    });
    parts.filter(|part| part.length > 0)
}

/// Takes `bytes` bytes from the front of a list, which must have them.
pub(crate) fn take_front(segments: &mut Vec<Segment>, mut bytes: usize) -> Vec<Segment> {
    let mut front = Vec::new();
    let mut used_up = 0;
    for segment in segments.iter_mut() {
        if bytes == 0 {
            break;
        }
        let length = segment.length.min(bytes);
        front.push(Segment { length, ..*segment });
        bytes -= length;
        segment.address.0 += length as u64;
        segment.length -= length;
        used_up += usize::from(segment.length == 0);
    }
    segments.drain(..used_up);
    front
}

/// Fills `target` from byte `offset` of the segments on; the caller has checked that there are
/// enough bytes.
pub(crate) fn read(memory: &GuestMemory, segments: &[Segment], offset: usize, target: &mut [u8]) {
    if let Some(slice) = within_first(memory, segments, offset, target.len()) {
        slice.copy_to(target);
        return;
    }
    let mut done = 0;
    for segment in part(segments, offset, target.len()) {
        let target = &mut target[done..done + segment.length];
        // Segments are checked to exist.
        let _ = memory.read_slice(target, segment.address);
        done += segment.length;
    }
}

/// Writes `source` at byte `offset` of the segments; the caller has checked that there are enough
/// bytes.
pub(crate) fn write(memory: &GuestMemory, segments: &[Segment], offset: usize, source: &[u8]) {
    if let Some(slice) = within_first(memory, segments, offset, source.len()) {
        slice.copy_from(source);
        return;
    }
    let mut done = 0;
    for segment in part(segments, offset, source.len()) {
        let source = &source[done..done + segment.length];
        // As in `read`.
        let _ = memory.write_slice(source, segment.address);
        done += segment.length;
    }
}

/// The memory of bytes that are all in the first segment, as headers usually are: this takes half
/// as long as what handles any bytes.
fn within_first<'a>(
    memory: &'a GuestMemory,
    segments: &[Segment],
    offset: usize,
    length: usize,
) -> Option<VolatileSlice<'a, BS<'a, WriteLog>>> {
    let first = segments.first()?;
    let end = offset.checked_add(length)?;
    let address = first.address.checked_add(offset as u64)?;
    // A segment may extend into the next region.
    (end <= first.length).then(|| memory.get_slice(address, length).ok())?
}

/// The region of guest memory of the last segment; the next segment is probably in the same one.
pub(crate) struct Region<'a> {
    start: u64,
    end: u64,
    place: *mut u8,
    bytes: Option<VolatileSlice<'a, BS<'a, WriteLog>>>,
}

impl Default for Region<'_> {
    /// An empty region.
    fn default() -> Self {
        Region {
            start: 0,
            end: 0,
            place: std::ptr::null_mut(),
            bytes: None,
        }
    }
}

impl<'a> Region<'a> {
    /// The region that holds an address; an empty one if none does.
    pub(crate) fn of(memory: &'a GuestMemory, address: GuestAddress) -> Region<'a> {
        let Some(region) = memory.find_region(address) else {
            return Region::default();
        };
        Region {
            start: region.start_addr().0,
            end: region.start_addr().0.saturating_add(region.len()),
            place: region.as_ptr(),
            bytes: region.as_volatile_slice().ok(),
        }
    }

    /// Host address of a segment, if all of it is in the region.
    #[inline]
    pub(crate) fn host_address(&self, segment: &Segment) -> Option<*mut u8> {
        let start = segment.address.0;
        let end = start.checked_add(segment.length as u64)?;
        (self.start <= start && end <= self.end)
            .then(|| self.place.wrapping_byte_add((start - self.start) as usize))
    }

    /// Whether all of a segment is in guest memory. Changes to the region in which it begins.
    #[inline]
    pub(crate) fn contains(&mut self, memory: &'a GuestMemory, segment: &Segment) -> bool {
        self.host_address(segment).is_some() || self.changes_to(memory, segment)
    }

    fn changes_to(&mut self, memory: &'a GuestMemory, segment: &Segment) -> bool {
        *self = Region::of(memory, segment.address);
        // It may extend into the next region.
        memory.check_range(segment.address, segment.length)
    }

    /// The `length` bytes from byte `offset` of a segment on, if they are in it and in the region,
    /// without another lookup.
    #[inline]
    pub(crate) fn bytes(
        &self,
        segment: &Segment,
        offset: usize,
        length: usize,
    ) -> Option<VolatileSlice<'a, BS<'a, WriteLog>>> {
        let in_segment = offset.checked_add(length)? <= segment.length;
        let start = segment.address.0.checked_sub(self.start)? as usize;
        let bytes = self.bytes.as_ref().filter(|_| in_segment)?;
        bytes.subslice(start.checked_add(offset)?, length).ok()
    }
}
