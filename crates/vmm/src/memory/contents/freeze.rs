//! Freezes RAM: its files never change again, and the VM continues in private pages.

use super::release::RELEASES_MAX;
use super::{Contents, Mapped};
use crate::memory::MemoryError;
use crate::memory::layers::{Layer, Segment, joined, union, visible, without_hidden};
use crate::memory::mapping::Mapping;
use jiffy_sys::memfd::{self, Pages};
use jiffy_wire::vmm::{Extent, MemoryLayout};
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

/// Ranges at most this many bytes apart are copied as one: few large mappings cost less than many
/// small ones.
const JOIN_GAP: u64 = 16 << 10;
/// Most mappings of RAM; the kernel allows a process 65530.
const SEGMENTS_MAX: usize = 16384;
/// How many layers there may be before a freeze merges all but the lowest.
const LAYERS_MAX: usize = 48;

/// RAM at one moment.
#[derive(Debug)]
pub struct Frozen {
    /// The files, lowest first.
    pub files: Vec<Arc<File>>,
    /// The ranges that each file holds.
    pub layout: MemoryLayout,
    /// Bytes that were copied.
    pub copied: u64,
}

impl Contents {
    /// Freezes the current contents of RAM.
    pub(in crate::memory) fn freeze(&mut self, mapping: &Mapping) -> Result<Frozen, MemoryError> {
        if mapping.pages != Pages::Small {
            return Err(MemoryError::HugePages);
        }
        let mut copied = 0;
        let mut private = true;
        if self.mapped == Mapped::Shared {
            let file = self.layers[0].file.clone();
            for Segment { extent, layer } in visible(&self.layers) {
                if layer == 0 {
                    mapping
                        .map_over(extent, Some(&file))
                        .map_err(MemoryError::Freeze)?;
                }
            }
            // Written pages of a range that is shared with others are private.
            private = self.layers.len() > 1;
            self.mapped = Mapped::Privately;
            seal(&file).map_err(MemoryError::Freeze)?;
        }
        if private {
            let written = self.written(mapping).map_err(MemoryError::Written)?;
            if !written.is_empty() || !self.released.is_empty() {
                copied = self.push_layer(mapping, &written)?;
            }
        }
        self.tracking.after_freeze();
        Ok(Frozen {
            files: self.layers.iter().map(|layer| layer.file.clone()).collect(),
            layout: MemoryLayout {
                size: mapping.size,
                covers: self.layers[1..]
                    .iter()
                    .map(|layer| layer.covers.clone())
                    .collect(),
            },
            copied,
        })
    }

    /// Makes a layer of the written and released ranges. Returns the bytes that were copied.
    fn push_layer(&mut self, mapping: &Mapping, written: &[Extent]) -> Result<u64, MemoryError> {
        let few = self.layers.len() <= LAYERS_MAX && self.cuts < RELEASES_MAX;
        let keep = if few { self.layers.len() } else { 1 };
        let (layer, copied) = copy(mapping, &self.layers, keep, written, &self.released)
            .map_err(MemoryError::Freeze)?;
        // The bytes are the same before and after. If this fails half way, only the tracking of
        // written pages is wrong, and the error reports that.
        let by_log = few && self.tracking.uses_log();
        let in_place = match by_log {
            true => &self.released,
            false => &layer.covers,
        };
        for extent in in_place {
            mapping
                .map_over(*extent, Some(&layer.file))
                .map_err(MemoryError::Freeze)?;
        }
        self.cuts = match by_log {
            true => self.cuts + self.released.len(),
            false => 0,
        };
        let mut layers = std::mem::take(&mut self.layers);
        layers.truncate(keep);
        layers.push(layer);
        // A guest writes to the same few pages again and again, so layers below are often hidden.
        self.layers = without_hidden(layers);
        self.released.clear();
        Ok(copied)
    }
}

/// Creates a new layer of the written and released ranges and of all old layers but the first
/// `keep`. Also returns how many bytes were copied into it.
fn copy(
    mapping: &Mapping,
    old: &[Layer],
    keep: usize,
    written: &[Extent],
    released: &[Extent],
) -> io::Result<(Layer, u64)> {
    let mut wanted = written.to_vec();
    wanted.extend(old[keep..].iter().flat_map(|layer| &layer.covers));
    let mut gap = JOIN_GAP;
    let (copy, covers) = loop {
        let copy = joined(wanted.clone(), gap);
        let covers = union([copy.as_slice(), released].concat());
        let mut layers = old[..keep].to_vec();
        layers.push(Layer {
            file: old[0].file.clone(),
            covers: covers.clone(),
        });
        if visible(&layers).len() <= SEGMENTS_MAX || gap >= mapping.size {
            break (copy, covers);
        }
        gap *= 4;
    };
    let file = Arc::new(memfd::create(
        "jiffy guest RAM layer",
        mapping.size,
        Pages::Small,
    )?);
    let mut copied = 0;
    for extent in &copy {
        copied += extent.length;
        write_out(mapping, &file, *extent)?;
    }
    seal(&file)?;
    Ok((Layer { file, covers }, copied))
}

#[allow(unsafe_code)] // Guest memory as the source of a write.
fn write_out(mapping: &Mapping, file: &File, extent: Extent) -> io::Result<()> {
    for (address, offset, length) in mapping.host_parts(extent) {
        let mut done = 0;
        while done < length {
            // SAFETY: the range is in our own mapping; the kernel copies from it, and no Rust
            // reference to it is made.
            let count = unsafe {
                libc::pwrite(
                    std::os::fd::AsRawFd::as_raw_fd(&file.as_fd()),
                    address.wrapping_add(done as usize).cast(),
                    (length - done) as usize,
                    (offset + done) as i64,
                )
            };
            match count {
                1.. => done += count as u64,
                0 => return Err(io::ErrorKind::WriteZero.into()),
                _ => {
                    let error = io::Error::last_os_error();
                    if error.kind() != io::ErrorKind::Interrupted {
                        return Err(error);
                    }
                }
            }
        }
    }
    Ok(())
}

/// Seals a file: no process that has it can change it, not even a compromised VMM.
fn seal(file: &File) -> io::Result<()> {
    use rustix::fs::SealFlags;
    let seals = SealFlags::FUTURE_WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    Ok(rustix::fs::fcntl_add_seals(file, seals)?)
}

#[cfg(test)]
mod tests {
    use super::super::release::RELEASE_MIN;
    use super::*;
    use crate::layout;
    use crate::memory::GuestRam;
    use crate::memory::layers::{PAGE, assemble};
    use jiffy_devices::virtio::balloon::Reclaim;
    use jiffy_wire::vmm::{Memory, PageSize};
    use proptest::prelude::*;
    use vm_memory::{Bytes, GuestAddress};

    /// A layer's files opened again, as another VM would.
    fn reopened(frozen: &Frozen) -> Vec<Layer> {
        let files = frozen
            .files
            .iter()
            .map(|file| file.try_clone().unwrap())
            .collect();
        assemble(files, Some(frozen.layout.clone()), frozen.layout.size).unwrap()
    }

    fn ram(size_mib: u32) -> GuestRam {
        GuestRam::create(&Memory {
            size_mib,
            pages: PageSize::Small,
            prefault: false,
        })
        .unwrap()
    }

    fn write(ram: &GuestRam, page: u64, value: u64) {
        ram.memory()
            .write_obj(value, GuestAddress(page * PAGE))
            .unwrap();
    }

    fn read(ram: &GuestRam, page: u64) -> u64 {
        ram.memory().read_obj(GuestAddress(page * PAGE)).unwrap()
    }

    #[test]
    fn the_first_freeze_copies_nothing_and_isolates_the_child() {
        let parent = ram(64);
        write(&parent, 5, 1);
        let frozen = parent.freeze().unwrap();
        assert_eq!((frozen.copied, frozen.files.len()), (0, 1));
        let child = GuestRam::from_layers(reopened(&frozen), parent.size()).unwrap();
        let file = &frozen.files[0];
        let error = std::os::unix::fs::FileExt::write_at(&**file, &[1], 0).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EPERM), "it is sealed");
        write(&parent, 5, 2);
        write(&parent, 6, 2);
        write(&child, 7, 3);
        assert_eq!((read(&child, 5), read(&child, 6)), (1, 0));
        assert_eq!((read(&parent, 5), read(&parent, 7)), (2, 0));
    }

    #[test]
    fn many_freezes_keep_few_layers_and_all_contents() {
        let parent = ram(64);
        for round in 0..200_u64 {
            write(&parent, round * 7 % 500, round);
            let frozen = parent.freeze().unwrap();
            assert!(frozen.files.len() <= LAYERS_MAX + 2);
            assert!(frozen.copied <= PAGE || frozen.files.len() == 2);
        }
        let frozen = parent.freeze().unwrap();
        let child = GuestRam::from_layers(reopened(&frozen), parent.size()).unwrap();
        for page in 0..500 {
            assert_eq!(read(&child, page), read(&parent, page), "page {page}");
        }
    }

    #[test]
    fn a_fully_covered_layer_is_dropped() {
        let parent = ram(64);
        parent.freeze().unwrap();
        for round in 0..10 {
            write(&parent, 5, round);
            assert_eq!(parent.freeze().unwrap().files.len(), 2);
        }
        write(&parent, 500, 1);
        let frozen = parent.freeze().unwrap();
        assert_eq!(frozen.files.len(), 3);
        let child = GuestRam::from_layers(reopened(&frozen), parent.size()).unwrap();
        assert_eq!((read(&child, 5), read(&child, 500)), (9, 1));
    }

    #[test]
    fn released_memory_is_zero_and_stays_zero_when_frozen() {
        let parent = ram(64);
        for page in 0..1024 {
            write(&parent, page, 9);
        }
        parent.release(GuestAddress(0), 512 * PAGE).unwrap();
        assert_eq!((read(&parent, 3), read(&parent, 600)), (0, 9));
        parent.freeze().unwrap();
        parent
            .release(GuestAddress(512 * PAGE), 256 * PAGE)
            .unwrap();
        assert_eq!(read(&parent, 600), 0);
        write(&parent, 601, 4);
        let frozen = parent.freeze().unwrap();
        // Linux before 6.7 also counts the page that was read.
        assert!((PAGE..=2 * PAGE).contains(&frozen.copied));
        let child = GuestRam::from_layers(reopened(&frozen), parent.size()).unwrap();
        let pages = [3, 600, 601, 602, 768].map(|page| read(&child, page));
        assert_eq!(pages, [0, 0, 4, 0, 9]);
        // Releasing invalid ranges from a guest changes nothing.
        for (start, length) in [(60 << 20, 8 << 20), (u64::MAX - 4095, 4096), (0, 0)] {
            assert!(parent.release(GuestAddress(start), length).is_err());
        }
        assert_eq!(read(&parent, 768), 9);
    }

    /// RAM of 64 MiB of which a pager shares pages 10 to 19, 4000 to 4001 and 5000 to 5127, each
    /// filled with its number. The other pages are zero.
    fn partly_shared() -> GuestRam {
        let ram = GuestRam::to_be_paged(64 << 20).unwrap();
        let file = memfd::create("test", ram.size(), Pages::Small).unwrap();
        for page in (10..20).chain([4000, 4001]).chain(5000..5128) {
            let bytes = u64::to_le_bytes(page);
            std::os::unix::fs::FileExt::write_all_at(&file, &bytes, page * PAGE).unwrap();
        }
        rustix::fs::fcntl_add_seals(&file, rustix::fs::SealFlags::WRITE).unwrap();
        let covers = [(10, 10), (4000, 2), (5000, 128)].map(|(offset, length)| Extent {
            offset: offset * PAGE,
            length: length * PAGE,
        });
        ram.share(file, covers.into()).unwrap();
        ram
    }

    #[test]
    fn a_freeze_includes_shared_and_private_ranges() {
        let parent = partly_shared();
        let expected = |page: u64, value| assert_eq!(read(&parent, page), value, "page {page}");
        write(&parent, 9, 1);
        write(&parent, 12, 2);
        write(&parent, 4002, 3);
        let frozen = parent.freeze().unwrap();
        // Only the written page of a shared range was copied.
        assert_eq!((frozen.copied, frozen.files.len()), (PAGE, 3));
        let child = GuestRam::from_layers(reopened(&frozen), parent.size()).unwrap();
        write(&child, 10, 4);
        write(&parent, 11, 5);
        for (page, value) in [(9, 1), (10, 10), (11, 5), (12, 2), (4001, 4001), (4002, 3)] {
            expected(page, value);
        }
        let pages = [9, 10, 11, 12, 19, 20, 4000, 4002].map(|page| read(&child, page));
        assert_eq!(pages, [1, 4, 11, 2, 19, 0, 4000, 3]);
        let again = parent.freeze().unwrap();
        let other = GuestRam::from_layers(reopened(&again), parent.size()).unwrap();
        assert_eq!([10, 11, 12].map(|page| read(&other, page)), [10, 5, 2]);
    }

    #[test]
    fn a_vm_writes_and_releases_shared_ranges_alone() {
        let (one, other) = (partly_shared(), partly_shared());
        write(&one, 12, 2);
        write(&one, 20, 2);
        assert_eq!(read(&other, 12), 12);
        one.release(GuestAddress(5 * PAGE), 16 * PAGE).unwrap();
        assert_eq!(read(&one, 20), 0);
        assert_eq!(read(&one, 12), 2, "too little to be a mapping of its own");
        write(&one, 5001, 2);
        one.release(GuestAddress(4990 * PAGE), 128 * PAGE).unwrap();
        assert_eq!([5000, 5001, 5117].map(|page| read(&one, page)), [0; 3]);
        assert_eq!((read(&one, 5118), read(&other, 5001)), (5118, 5001));
        write(&one, 5050, 3);
        let frozen = one.freeze().unwrap();
        assert!(
            frozen.copied <= 16 * PAGE,
            "what is untouched is not copied"
        );
        let child = GuestRam::from_layers(reopened(&frozen), one.size()).unwrap();
        for page in [10, 12, 20, 5000, 5001, 5050, 5117, 5118] {
            assert_eq!(read(&child, page), read(&one, page), "page {page}");
        }
    }

    #[test]
    fn a_file_with_a_wrong_size_or_range_is_not_shared() {
        let ram = GuestRam::to_be_paged(64 << 20).unwrap();
        let extent = |offset, length| vec![Extent { offset, length }];
        for (size, covers) in [
            (32 << 20, extent(0, PAGE)),
            (64 << 20, extent(1, PAGE)),
            (64 << 20, extent(64 << 20, PAGE)),
        ] {
            let file = memfd::create("test", size, Pages::Small).unwrap();
            assert!(ram.share(file, covers).is_err());
        }
        write(&ram, 0, 1);
        assert_eq!(read(&ram, 0), 1);
    }

    #[test]
    fn scattered_writes_end_in_a_bounded_number_of_mappings() {
        let parent = ram(512);
        parent.freeze().unwrap();
        for page in (0..(512 << 20) / PAGE).step_by(8) {
            write(&parent, page, page);
        }
        let frozen = parent.freeze().unwrap();
        assert!(visible(&reopened(&frozen)).len() <= SEGMENTS_MAX);
        let child = GuestRam::from_layers(reopened(&frozen), parent.size()).unwrap();
        for page in (0..(512 << 20) / PAGE).step_by(8) {
            assert_eq!(read(&child, page), page);
        }
    }

    #[test]
    fn a_freeze_with_a_dirty_log_copies_only_newly_written_pages() {
        let parent = ram(3100);
        let high = layout::HIGH_RAM / PAGE + 8;
        for round in 0..3 {
            assert_eq!(parent.wants_log(), round > 1);
            write(&parent, 5, round);
            write(&parent, high, round);
            parent.freeze().unwrap();
        }
        parent.keep_log_of_monitor();
        assert!(!parent.wants_log());
        let mut before = parent.freeze().unwrap().files.len();
        for round in 10..20 {
            write(&parent, 5, round);
            assert_eq!(parent.written().unwrap().len(), 1);
            assert_eq!(parent.written().unwrap().len(), 1, "asking changes nothing");
            if round > 14 {
                write(&parent, high, round);
            }
            let frozen = parent.freeze().unwrap();
            let pages = if round > 14 { 2 } else { 1 };
            assert_eq!(frozen.copied, pages * PAGE);
            assert!(frozen.files.len() <= before + 1);
            before = frozen.files.len();
            let child = GuestRam::from_layers(reopened(&frozen), parent.size()).unwrap();
            for page in [5, 6, high] {
                assert_eq!(read(&child, page), read(&parent, page), "page {page}");
            }
        }
        assert!(parent.written().unwrap().is_empty());
        assert_eq!(parent.freeze().unwrap().copied, 0);
    }

    #[test]
    fn releases_with_a_dirty_log_keep_mappings_bounded() {
        let parent = ram(2048);
        for _ in 0..2 {
            parent.freeze().unwrap();
        }
        parent.keep_log_of_monitor();
        parent.freeze().unwrap();
        let block = 2 * RELEASE_MIN / PAGE;
        for round in 0..6 {
            for number in 0..2000 {
                let page = number * block + round % 2 * 64;
                write(&parent, page, 7);
                write(&parent, page + 1, round);
                parent
                    .release(GuestAddress(page * PAGE), RELEASE_MIN)
                    .unwrap();
                if number % 100 == 0 {
                    write(&parent, page + 1, 9);
                }
            }
            let frozen = parent.freeze().unwrap();
            assert!(parent.lock().cuts <= RELEASES_MAX);
            assert_eq!(read(&parent, round % 2 * 64 + 1), 9);
            let child = GuestRam::from_layers(reopened(&frozen), parent.size()).unwrap();
            for page in (0..2000 * block).step_by(32) {
                for page in [page, page + 1] {
                    assert_eq!(read(&child, page), read(&parent, page), "page {page}");
                }
            }
        }
        let mappings = std::fs::read_to_string("/proc/self/maps").unwrap();
        assert!(mappings.lines().count() < 30_000);
    }

    #[test]
    fn memory_above_the_hole_freezes_too() {
        let parent = ram(3100);
        let high = GuestAddress(layout::HIGH_RAM + 8 * PAGE);
        parent.freeze().unwrap();
        parent.memory().write_obj(77_u64, high).unwrap();
        let frozen = parent.freeze().unwrap();
        let child = GuestRam::from_layers(reopened(&frozen), parent.size()).unwrap();
        assert_eq!(child.memory().read_obj::<u64>(high).unwrap(), 77);
    }

    #[derive(Debug, Clone)]
    enum Step {
        Write { vm: usize, page: u64, value: u64 },
        Fork { vm: usize },
        KeepLog { vm: usize },
        Release { vm: usize, block: u64 },
        End { vm: usize },
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            8 => (any::<usize>(), 0_u64..1024, any::<u64>())
                .prop_map(|(vm, page, value)| Step::Write { vm, page, value }),
            4 => any::<usize>().prop_map(|vm| Step::Fork { vm }),
            1 => any::<usize>().prop_map(|vm| Step::KeepLog { vm }),
            1 => (any::<usize>(), 0_u64..16).prop_map(|(vm, block)| Step::Release { vm, block }),
            1 => any::<usize>().prop_map(|vm| Step::End { vm }),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]

        /// Parents that fork again and again, children that fork, deep chains, parents that end
        /// first: every page of every VM is what a plain copy would hold.
        #[test]
        fn each_fork_reads_its_own_writes(steps in proptest::collection::vec(step(), 1..120)) {
            let mut vms = vec![(ram(64), vec![0_u64; 1024])];
            for step in steps {
                let count = vms.len();
                match step {
                    Step::Write { vm, page, value } => {
                        let (ram, model) = &mut vms[vm % count];
                        write(ram, page, value);
                        model[page as usize] = value;
                    }
                    Step::Fork { vm } => {
                        let (ram, model) = &vms[vm % count];
                        let frozen = ram.freeze().unwrap();
                        // Maps them in both ways.
                        let child = match vm % 2 {
                            0 => GuestRam::from_layers(reopened(&frozen), ram.size()),
                            _ => GuestRam::laid_over(reopened(&frozen), ram.size()),
                        };
                        let child = child.unwrap();
                        for (page, value) in (0..).zip(model) {
                            prop_assert_eq!(read(&child, page), *value, "page {}", page);
                        }
                        let model = model.clone();
                        if count < 12 {
                            vms.push((child, model));
                        }
                    }
                    Step::Release { vm, block } => {
                        let (ram, model) = &mut vms[vm % count];
                        ram.release(GuestAddress(block * 64 * PAGE), 64 * PAGE).unwrap();
                        model[block as usize * 64..][..64].fill(0);
                    }
                    Step::KeepLog { vm } => {
                        let ram = &vms[vm % count].0;
                        if ram.wants_log() {
                            ram.keep_log_of_monitor();
                        }
                    }
                    Step::End { vm } if count > 1 => {
                        vms.remove(vm % count);
                    }
                    _ => {}
                }
            }
            for (ram, model) in &vms {
                for (page, value) in (0..).zip(model) {
                    prop_assert_eq!(read(ram, page), *value, "page {}", page);
                }
            }
        }
    }
}
