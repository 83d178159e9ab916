//! The working sets of images in memory, each once, for all VMs that map them.
//!
//! When the first VM is restored from an image, its working set is prefetched. Afterwards it is put
//! into a sealed memfd that is as long as the image, at the same offsets. Later VMs map the memfd
//! privately instead of having pages of their own filled, and share the pages that they do not
//! write.

use crate::image::{ChunkImage, Content, ImageKey, Unreadable};
use crate::scratch::{Scratch, first};
use jiffy_sys::memfd::{self, Pages};
use jiffy_wire::pager::WORKING_SET_RANGES;
use jiffy_wire::vmm::Extent;
use rustix::fs::{SealFlags, fcntl_add_seals};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// Most bytes of one working set: the chunks that are needed first. The rest is prefetched.
const MAX_BYTES: u64 = 16 << 20;
/// Most bytes of all working sets; the least recently used are dropped.
const MAX_TOTAL: u64 = 64 << 20;
/// Ranges are joined down to this number. Mapping a range costs a VM some 8,000 instructions; a gap
/// within a range costs only memory, once.
const FREE_RANGES: usize = 16;
/// Most bytes of gaps within ranges, in addition to the bytes of the chunks.
const MAX_GAPS: u64 = 2 << 20;
/// Most working sets that are read at once; others wait for a later restore.
const MAX_READS: usize = 2;
const PAGE: u64 = 4096;

/// The working set of an image, or the first part of it.
#[derive(Debug)]
pub struct WorkingSet {
    file: File,
    covers: Vec<Extent>,
}

impl WorkingSet {
    /// Reads these chunks, none of which needs an origin, in the order of need.
    ///
    /// # Errors
    ///
    /// If a chunk can't be read, or there is no memory for them.
    pub fn read(
        image: &dyn ChunkImage,
        chunks: &[u32],
        scratch: &mut Scratch,
    ) -> Result<WorkingSet, Unreadable> {
        let size = image.chunk_size() as u64;
        let failed = |error: io::Error| {
            Unreadable(format!(
                "a working set could not be kept in memory: {error}"
            ))
        };
        let covers = join_gaps(page_ranges(chunks, size, image.size()));
        let file =
            memfd::create("jiffy working set", image.size(), Pages::Small).map_err(failed)?;
        for extent in &covers {
            let end = extent.offset + extent.length;
            for offset in (extent.offset..end).step_by(size as usize) {
                let buffer = first(&mut scratch.chunks, size as usize);
                let chunk = (offset / size) as u32;
                if let Content::Bytes { .. } = image.read(&mut scratch.decoder, chunk, buffer)? {
                    let buffer = &buffer[..size.min(end - offset) as usize];
                    file.write_all_at(buffer, offset).map_err(failed)?;
                }
            }
        }
        // Sealed, so that no VM can change it for the others.
        let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        fcntl_add_seals(&file, seals).map_err(|error| failed(error.into()))?;
        Ok(WorkingSet { file, covers })
    }

    /// The ranges of the image that it holds, sorted and disjoint.
    pub fn covers(&self) -> &[Extent] {
        &self.covers
    }

    /// Most bytes it may take: a zero page in it takes memory once it is read.
    fn bytes(&self) -> u64 {
        self.covers.iter().map(|extent| extent.length).sum()
    }
}

impl AsFd for WorkingSet {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// The first of these chunks as ranges of whole pages, joined where they touch.
fn page_ranges(chunks: &[u32], chunk_size: u64, image_size: u64) -> Vec<Extent> {
    let end = image_size / PAGE * PAGE;
    let mut chunks = chunks[..chunks.len().min((MAX_BYTES / chunk_size) as usize)].to_vec();
    chunks.sort_unstable();
    chunks.dedup();
    let mut ranges: Vec<Extent> = Vec::new();
    for chunk in chunks {
        let offset = u64::from(chunk) * chunk_size;
        let until = (offset + chunk_size).min(end);
        match ranges.last_mut() {
            _ if until <= offset => {}
            Some(last) if offset == last.offset + last.length => last.length = until - last.offset,
            _ => ranges.push(Extent {
                offset,
                length: until - offset,
            }),
        }
    }
    ranges
}

/// Joins ranges across gaps, the narrowest first, until there are few ranges or the gaps are too
/// large. If there are still too many, the rest is left to be filled by faults.
fn join_gaps(ranges: Vec<Extent>) -> Vec<Extent> {
    let gap = |index: usize| {
        let (one, next) = (&ranges[index - 1], &ranges[index]);
        next.offset - (one.offset + one.length)
    };
    let mut narrowest_first: Vec<usize> = (1..ranges.len()).collect();
    narrowest_first.sort_by_key(|index| gap(*index));
    narrowest_first.truncate(ranges.len().saturating_sub(FREE_RANGES));
    let mut room = ranges.iter().map(|extent| extent.length).sum::<u64>() + MAX_GAPS;
    let mut with_last = vec![false; ranges.len()];
    for index in narrowest_first {
        let Some(left) = room.checked_sub(gap(index)) else {
            break;
        };
        room = left;
        with_last[index] = true;
    }
    let mut joined: Vec<Extent> = Vec::new();
    for (extent, with_last) in ranges.into_iter().zip(with_last) {
        match joined.last_mut() {
            Some(last) if with_last => last.length = extent.offset + extent.length - last.offset,
            _ => joined.push(extent),
        }
    }
    joined.truncate(WORKING_SET_RANGES);
    joined
}

/// A working set that a VM may map, and the ranges of it that another VM's guest wrote at once, if
/// known.
pub type Offer = (Arc<WorkingSet>, Option<Vec<Extent>>);

/// The working sets that are kept.
#[derive(Debug, Default)]
pub struct WorkingSets {
    /// The most recently used is the last.
    kept: Vec<(ImageKey, Offer)>,
    /// Working sets that are being read.
    reading: Vec<ImageKey>,
}

impl WorkingSets {
    /// The working set of an image, if it is in memory.
    pub fn of(&mut self, image: ImageKey) -> Option<Offer> {
        let index = self.kept.iter().position(|(key, _)| *key == image)?;
        let entry = self.kept.remove(index);
        self.kept.push(entry);
        self.kept.last().map(|(_, offer)| offer.clone())
    }

    /// Whether the caller must read it now, and then call [`WorkingSets::keep`].
    pub fn begin_read(&mut self, image: ImageKey) -> bool {
        let known = self.reading.contains(&image) || self.kept.iter().any(|(key, _)| *key == image);
        let wanted = !known && self.reading.len() < MAX_READS;
        if wanted {
            self.reading.push(image);
        }
        wanted
    }

    /// Keeps a working set that was read; `None` if it could not be read.
    pub fn keep(&mut self, image: ImageKey, set: Option<WorkingSet>) {
        self.reading.retain(|key| *key != image);
        self.kept
            .extend(set.map(|set| (image, (Arc::new(set), None))));
        let mut all: u64 = self.kept.iter().map(|(_, (set, _))| set.bytes()).sum();
        while all > MAX_TOTAL {
            all -= self.kept.remove(0).1.0.bytes();
        }
    }

    /// Notes the ranges that a VM's guest wrote. Only the first VM's ranges are kept, as far as
    /// they are valid: later VMs get copies of these pages.
    pub fn note_written(&mut self, image: ImageKey, mut ranges: Vec<Extent>) {
        let Some((_, (set, written))) = self.kept.iter_mut().find(|(key, _)| *key == image) else {
            return;
        };
        ranges.truncate(WORKING_SET_RANGES);
        let is_covered = |range: &Extent| {
            set.covers.iter().any(|extent| {
                let before = range.offset.wrapping_sub(extent.offset);
                before < extent.length && range.length <= extent.length - before
            })
        };
        let mut reported: Vec<Extent> = Vec::new();
        for range in ranges {
            let reached = reported.last().map_or(0, |last| last.offset + last.length);
            let makes_sense = range.offset >= reached
                && range.length > 0
                && (range.offset | range.length).is_multiple_of(PAGE)
                && is_covered(&range);
            if !makes_sense {
                continue;
            }
            // Copying a page between two ranges costs less than another range.
            let with_last = reported.last().map(|last| Extent {
                offset: last.offset,
                length: range.offset + range.length - last.offset,
            });
            match with_last.filter(|both| range.offset - reached <= PAGE && is_covered(both)) {
                Some(both) => *reported.last_mut().expect("there is one") = both,
                None => reported.push(range),
            }
        }
        written.get_or_insert(reported);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_store::{Decoder, ImageId};
    use proptest::prelude::*;

    const CHUNK: u64 = 8 << 10;

    /// Every other chunk is zero, the others have their number in every byte.
    struct Numbers(u64);

    impl ChunkImage for Numbers {
        fn id(&self) -> ImageId {
            ImageId([0; 16])
        }

        fn size(&self) -> u64 {
            self.0
        }

        fn chunk_size(&self) -> usize {
            CHUNK as usize
        }

        fn read(
            &self,
            _: &mut Decoder,
            chunk: u32,
            bytes: &mut [u8],
        ) -> Result<Content, Unreadable> {
            if chunk.is_multiple_of(2) {
                return Ok(Content::Zero);
            }
            bytes.fill(chunk as u8);
            Ok(Content::Bytes { read: 1 })
        }
    }

    proptest! {
        #[test]
        fn ranges_hold_the_chunks_and_fit_a_vm(
            chunks in proptest::collection::vec(0_u32..40_000, 0..3000),
            pages in 1_u64..90_000,
        ) {
            let size = pages * PAGE;
            let single = page_ranges(&chunks, CHUNK, size);
            let all: u64 = single.iter().map(|extent| extent.length).sum();
            let ranges = join_gaps(single);
            prop_assert!(ranges.len() <= WORKING_SET_RANGES);
            let length: u64 = ranges.iter().map(|extent| extent.length).sum();
            prop_assert!(length <= 2 * all + MAX_GAPS);
            let mut reached = None;
            for extent in &ranges {
                prop_assert!(extent.length > 0 && (extent.offset | extent.length) % PAGE == 0);
                prop_assert!(reached.is_none_or(|end| extent.offset > end));
                let end = extent.offset + extent.length;
                prop_assert!(end <= size);
                reached = Some(end);
            }
            for chunk in chunks.iter().take((MAX_BYTES / CHUNK) as usize) {
                let start = u64::from(*chunk) * CHUNK;
                let end = (start + CHUNK).min(size);
                let holds = |extent: &Extent| {
                    extent.offset <= start && end <= extent.offset + extent.length
                };
                let is_left_out = ranges.len() == WORKING_SET_RANGES;
                prop_assert!(start >= size || is_left_out || ranges.iter().any(holds));
            }
        }
    }

    #[test]
    fn a_working_set_holds_the_image_s_bytes_and_is_sealed() {
        // The last chunk is half a chunk.
        let image = Numbers(20 * CHUNK + PAGE);
        let chunks = [20, 3, 5, 19, 15];
        let set = WorkingSet::read(&image, &chunks, &mut Scratch::default()).unwrap();
        let extent = |first, length| Extent {
            offset: first * CHUNK,
            length,
        };
        let expected = [
            extent(3, CHUNK),
            extent(5, CHUNK),
            extent(15, CHUNK),
            extent(19, CHUNK + PAGE),
        ];
        assert_eq!(set.covers(), expected);
        for chunk in [3, 5, 15, 19] {
            let mut bytes = [0; CHUNK as usize];
            set.file.read_exact_at(&mut bytes, chunk * CHUNK).unwrap();
            assert_eq!(bytes, [chunk as u8; CHUNK as usize]);
        }
        assert!(set.file.write_all_at(b"x", 0).is_err());
        assert!(set.file.set_len(1).is_err());
        assert_eq!(set.bytes(), 4 * CHUNK + PAGE);
    }

    #[test]
    fn scattered_extents_are_joined_across_their_gaps() {
        // 200 single chunks, two apart and once far apart.
        let chunks: Vec<u32> = (0..100).chain(9000..9100).map(|n| n * 2).collect();
        let of = |chunks: &[u32]| join_gaps(page_ranges(chunks, CHUNK, 1 << 30));
        let few = of(&chunks);
        assert_eq!(few.len(), FREE_RANGES);
        let between = |pair: &[Extent]| pair[1].offset - pair[0].offset > 10_000 * CHUNK;
        assert_eq!(few.windows(2).filter(|pair| between(pair)).count(), 1);
        // Too far apart for all to be joined.
        let chunks: Vec<u32> = (0..200).map(|n| n * 50).collect();
        let many = of(&chunks);
        assert!((100..200).contains(&many.len()), "{}", many.len());
    }

    #[test]
    fn the_first_report_of_written_pages_counts_within_the_working_set() {
        let key = ImageKey {
            id: ImageId([1; 16]),
            file: (0, 0, 0),
        };
        let extent = |page, pages| Extent {
            offset: page * PAGE,
            length: pages * PAGE,
        };
        let mut sets = WorkingSets::default();
        sets.note_written(key, vec![extent(1, 1)]);
        let image = Numbers(64 * CHUNK);
        let set = WorkingSet::read(&image, &[1, 2, 3, 40], &mut Scratch::default()).unwrap();
        sets.keep(key, Some(set));
        assert_eq!(sets.of(key).unwrap().1, None);
        let odd = Extent {
            offset: 5 * PAGE + 1,
            length: PAGE,
        };
        let endless = Extent {
            offset: 3 * PAGE,
            length: u64::MAX - PAGE + 1,
        };
        let said = vec![
            extent(1, 1),
            extent(2, 1),
            odd,
            endless,
            extent(4, 0),
            extent(4, 2),
            extent(3, 1),
            extent(7, 2),
            extent(81, 1),
            extent(90, 1),
        ];
        sets.note_written(key, said);
        // 2 and 4 are one page apart and are reported as one range.
        let known = Some(vec![extent(2, 4), extent(81, 1)]);
        assert_eq!(sets.of(key).unwrap().1, known);
        sets.note_written(key, Vec::new());
        assert_eq!(sets.of(key).unwrap().1, known);
    }

    #[test]
    fn the_least_recently_used_working_set_is_dropped_first() {
        let set = |length| WorkingSet {
            file: memfd::create("test", PAGE, Pages::Small).unwrap(),
            covers: vec![Extent { offset: 0, length }],
        };
        let id = |number: u8| ImageKey {
            id: ImageId([number; 16]),
            file: (0, 0, 0),
        };
        let mut sets = WorkingSets::default();
        for number in 1..=4 {
            assert!(sets.begin_read(id(number)) && !sets.begin_read(id(number)));
            sets.keep(id(number), Some(set(MAX_BYTES)));
            assert!(!sets.begin_read(id(number)), "it is here");
        }
        assert!(sets.of(id(1)).is_some());
        assert!(sets.begin_read(id(5)));
        sets.keep(id(5), Some(set(1)));
        assert!(sets.of(id(2)).is_none() && sets.of(id(1)).is_some());
        // No more than two at once.
        assert!(sets.begin_read(id(7)) && sets.begin_read(id(8)) && !sets.begin_read(id(6)));
        sets.keep(id(7), None);
        // One that can't be read may be tried again.
        assert!(sets.begin_read(id(6)));
        sets.keep(id(6), None);
        assert!(sets.begin_read(id(6)));
    }
}
