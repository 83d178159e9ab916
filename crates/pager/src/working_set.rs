//! The working sets of images in memory, each once, for all VMs that map them.
//!
//! The first VM that is restored from an image has its working set filled ahead.
//! Then it is put into a sealed memfd, as long as the image, at its offsets:
//! later VMs map that privately instead of having pages of their own filled, and
//! share what they do not write.

use crate::errands::Hands;
use crate::image::{ChunkImage, Content, ImageKey, Unreadable};
use crate::vm::first;
use jiffy_sys::memfd::{self, Pages};
use jiffy_wire::pager::WORKING_SET_RANGES;
use jiffy_wire::vmm::Extent;
use rustix::fs::{SealFlags, fcntl_add_seals};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// Bytes of one, at most: what is needed first. The rest is filled ahead.
const MOST: u64 = 16 << 20;
/// Bytes of all together, at most; those used longest ago go.
const ALL: u64 = 64 << 20;
/// Bytes between two chunks that are taken along: a further range costs a VM more
/// to map.
const GAP: u64 = 16 << 10;
const PAGE: u64 = 4096;

/// The working set of an image, or the first of it.
#[derive(Debug)]
pub struct WorkingSet {
    file: File,
    covers: Vec<Extent>,
    bytes: u64,
}

impl WorkingSet {
    /// Reads these chunks, which are here, as they are needed: the first first.
    pub fn read(
        image: &dyn ChunkImage,
        chunks: &[u32],
        hands: &mut Hands,
    ) -> Result<WorkingSet, Unreadable> {
        let size = image.chunk_size() as u64;
        let failed = |error: io::Error| {
            Unreadable(format!(
                "a working set could not be kept in memory: {error}"
            ))
        };
        let covers = ranges(chunks, size, image.size());
        let file =
            memfd::create("jiffy working set", image.size(), Pages::Small).map_err(failed)?;
        let mut bytes = 0;
        for extent in &covers {
            let end = extent.offset + extent.length;
            for offset in (extent.offset..end).step_by(size as usize) {
                let buffer = first(&mut hands.chunks, size as usize);
                let chunk = (offset / size) as u32;
                if let Content::Bytes { .. } = image.read(&mut hands.decoder, chunk, buffer)? {
                    let buffer = &buffer[..size.min(end - offset) as usize];
                    file.write_all_at(buffer, offset).map_err(failed)?;
                    bytes += buffer.len() as u64;
                }
            }
        }
        // Nobody it is given to can change it for the others.
        let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        fcntl_add_seals(&file, seals).map_err(|error| failed(error.into()))?;
        Ok(WorkingSet {
            file,
            covers,
            bytes,
        })
    }

    /// The ranges of the image that it holds, sorted, apart from another.
    pub fn covers(&self) -> &[Extent] {
        &self.covers
    }

    /// Bytes of all ranges.
    pub fn length(&self) -> u64 {
        self.covers.iter().map(|extent| extent.length).sum()
    }
}

impl AsFd for WorkingSet {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Whole pages around the first of these chunks, few enough to be mapped.
fn ranges(chunks: &[u32], chunk_size: u64, image_size: u64) -> Vec<Extent> {
    let end = image_size / PAGE * PAGE;
    let mut sorted = chunks[..chunks.len().min((MOST / chunk_size) as usize)].to_vec();
    sorted.sort_unstable();
    let mut gap = GAP;
    loop {
        let mut covers: Vec<Extent> = Vec::new();
        for chunk in &sorted {
            let offset = u64::from(*chunk) * chunk_size;
            let until = (offset + chunk_size).min(end);
            match covers.last_mut() {
                _ if until <= offset => {}
                Some(last) if offset <= last.offset + last.length + gap => {
                    last.length = until - last.offset;
                }
                _ => covers.push(Extent {
                    offset,
                    length: until - offset,
                }),
            }
        }
        if covers.len() <= WORKING_SET_RANGES {
            return covers;
        }
        gap *= 2;
    }
}

/// Those that are kept.
#[derive(Debug, Default)]
pub struct WorkingSets {
    /// The one used last is the last.
    kept: Vec<(ImageKey, Arc<WorkingSet>)>,
    /// Being read.
    coming: Vec<ImageKey>,
}

impl WorkingSets {
    /// That of an image, if it is here.
    pub fn of(&mut self, image: ImageKey) -> Option<Arc<WorkingSet>> {
        let index = self.kept.iter().position(|(key, _)| *key == image)?;
        let entry = self.kept.remove(index);
        self.kept.push(entry);
        self.kept.last().map(|(_, set)| set.clone())
    }

    /// Whether it is to be read now; then [`WorkingSets::keep`] has to follow.
    pub fn is_wanted(&mut self, image: ImageKey) -> bool {
        let known = self.coming.contains(&image) || self.kept.iter().any(|(key, _)| *key == image);
        if !known {
            self.coming.push(image);
        }
        !known
    }

    /// It was read, or could not be.
    pub fn keep(&mut self, image: ImageKey, set: Option<WorkingSet>) {
        self.coming.retain(|key| *key != image);
        self.kept.extend(set.map(|set| (image, Arc::new(set))));
        let mut all: u64 = self.kept.iter().map(|(_, set)| set.bytes).sum();
        while all > ALL {
            all -= self.kept.remove(0).1.bytes;
        }
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
            let ranges = ranges(&chunks, CHUNK, size);
            prop_assert!(ranges.len() <= WORKING_SET_RANGES);
            let mut reached = None;
            for extent in &ranges {
                prop_assert!(extent.length > 0 && (extent.offset | extent.length) % PAGE == 0);
                prop_assert!(reached.is_none_or(|end| extent.offset > end));
                let end = extent.offset + extent.length;
                prop_assert!(end <= size);
                reached = Some(end);
            }
            for chunk in chunks.iter().take((MOST / CHUNK) as usize) {
                let start = u64::from(*chunk) * CHUNK;
                let end = (start + CHUNK).min(size);
                let holds = |extent: &Extent| {
                    extent.offset <= start && end <= extent.offset + extent.length
                };
                prop_assert!(start >= size || ranges.iter().any(holds));
            }
        }
    }

    #[test]
    fn it_has_the_bytes_of_the_image_and_cannot_be_changed() {
        // The last chunk is half a chunk.
        let image = Numbers(20 * CHUNK + PAGE);
        let chunks = [20, 3, 5, 19, 15];
        let set = WorkingSet::read(&image, &chunks, &mut Hands::default()).unwrap();
        let extent = |first, length| Extent {
            offset: first * CHUNK,
            length,
        };
        assert_eq!(
            set.covers(),
            [
                extent(3, 3 * CHUNK),
                extent(15, CHUNK),
                extent(19, CHUNK + PAGE)
            ]
        );
        let mut bytes = vec![9; 3 * CHUNK as usize];
        set.file.read_exact_at(&mut bytes, 3 * CHUNK).unwrap();
        let expected: Vec<u8> = [3, 0, 5]
            .into_iter()
            .flat_map(|byte| vec![byte; CHUNK as usize])
            .collect();
        assert!(bytes == expected);
        assert!(set.file.write_all_at(b"x", 0).is_err());
        assert!(set.file.set_len(1).is_err());
        assert_eq!(set.bytes, 4 * CHUNK);
    }

    #[test]
    fn those_used_longest_ago_go_first() {
        let set = |bytes| WorkingSet {
            file: memfd::create("test", PAGE, Pages::Small).unwrap(),
            covers: Vec::new(),
            bytes,
        };
        let id = |number: u8| ImageKey {
            id: ImageId([number; 16]),
            file: (0, 0, 0),
        };
        let mut sets = WorkingSets::default();
        for number in 1..=4 {
            assert!(sets.is_wanted(id(number)) && !sets.is_wanted(id(number)));
            sets.keep(id(number), Some(set(MOST)));
            assert!(!sets.is_wanted(id(number)), "it is here");
        }
        assert!(sets.of(id(1)).is_some());
        assert!(sets.is_wanted(id(5)));
        sets.keep(id(5), Some(set(1)));
        assert!(sets.of(id(2)).is_none() && sets.of(id(1)).is_some());
        // One that can't be read may be tried again.
        assert!(sets.is_wanted(id(6)));
        sets.keep(id(6), None);
        assert!(sets.is_wanted(id(6)));
    }
}
