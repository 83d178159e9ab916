//! A complete captured VM on disk.

use super::memory;
use crate::durable;
use crate::model::snapshot::Manifest;
use crate::paths::volume_in;
use crate::records;
use crate::roots;
use jiffy_sys::causes;
use jiffy_sys::regular;
use jiffy_wire::api::{MemoryForm, Snapshot};
use jiffy_wire::state::Envelope;
use jiffy_wire::vmm::Extent;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Checks by its envelope that the saved state in this file can be read.
fn check_state(path: &Path) -> Result<(), String> {
    let shown = path.display();
    let mut start = Vec::new();
    let length = regular::open(path)
        .and_then(|file| {
            let length = file.metadata()?.len();
            file.take(Envelope::BYTES as u64).read_to_end(&mut start)?;
            Ok(length)
        })
        .map_err(|error| format!("{shown} can't be read: {error}"))?;
    let envelope = Envelope::read(&start, length);
    envelope
        .map(drop)
        .map_err(|error| format!("{shown} can't be used: {error}"))
}

/// Name of the root file system's file in a capture's folder.
pub const ROOT: &str = "root.erofs";

/// A captured VM's folder and what its manifest says.
#[derive(Debug, Clone)]
pub struct Saved {
    /// The folder.
    pub folder: PathBuf,
    /// What it is.
    pub manifest: Manifest,
    /// Ranges that a guest writes to soon after a restore, if they are known.
    pub prefault: Vec<Extent>,
    /// Ranges that a guest accesses soon after a restore, if they are known.
    pub accessed: Vec<Extent>,
}

/// Most of RAM that is prefaulted: one part in this many.
const PREFAULT_SHARE: u64 = 8;
/// Ranges closer than this, in bytes, are merged: one page too many costs less than one more
/// range.
const PREFAULT_GAP: u64 = 4096;

impl Saved {
    /// Reads the manifest.
    ///
    /// # Errors
    ///
    /// If the manifest can't be read, is damaged, or is of another version: a sentence without its
    /// full stop.
    pub fn open(folder: PathBuf) -> Result<Saved, String> {
        match Manifest::load(&folder) {
            Ok(manifest) => Ok(Saved::new(folder, manifest)),
            Err(error) => Err(causes::sentence(&error)),
        }
    }

    /// The captured VM in this folder.
    pub fn new(folder: PathBuf, manifest: Manifest) -> Saved {
        let ram = u64::from(manifest.spec.ram_mib()) << 20;
        let ranges =
            |path| merged_and_bounded(records::prefault::load(path).unwrap_or_default(), ram);
        Saved {
            prefault: ranges(&prefault_in(&folder)),
            accessed: ranges(&accessed_in(&folder)),
            folder,
            manifest,
        }
    }

    /// Saves the ranges that a restored guest has written and accessed soon after its start. Losing
    /// them costs only speed.
    ///
    /// # Errors
    ///
    /// If a file can't be written.
    pub fn save_first_ranges(
        &mut self,
        written: Vec<Extent>,
        accessed: Vec<Extent>,
    ) -> io::Result<()> {
        let ram = u64::from(self.manifest.spec.ram_mib()) << 20;
        self.accessed = merged_and_bounded(accessed, ram);
        records::prefault::save(&accessed_in(&self.folder), &self.accessed)?;
        // Last, because it marks the snapshot as tested.
        self.prefault = merged_and_bounded(written, ram);
        records::prefault::save(&prefault_in(&self.folder), &self.prefault)
    }

    /// Whether it was restored once: the ranges to prefault are then known, even if there are none.
    pub fn was_restored(&self) -> bool {
        prefault_in(&self.folder).exists()
    }

    /// Checks that all its files exist and are of versions that are read. Damaged contents are
    /// found only by a restore.
    ///
    /// # Errors
    ///
    /// If a file is missing or empty, or of another version: a sentence without its full stop.
    pub fn check(&self) -> Result<(), String> {
        let root = self.manifest.lazy_root.is_none().then(|| self.root());
        for file in [self.state(), self.memory()].into_iter().chain(root) {
            durable::check_not_empty(&file)?;
        }
        check_state(&self.state())?;
        match self.manifest.memory {
            MemoryForm::Raw => Ok(()),
            MemoryForm::Image => memory::check(&self.memory()),
        }
    }

    /// Why the snapshot of this name can't be used, in one sentence; `None` if it can.
    pub fn problem(&self, name: &str) -> Option<String> {
        let spec = &self.manifest.spec;
        let root = spec.root_disk.as_ref().map(|_| roots::NAME);
        let volumes = spec.disks.iter().map(|disk| disk.name.as_str());
        let there = |name: &str| durable::check_not_empty(&self.volume(name));
        let checked = self
            .check()
            .and_then(|()| volumes.chain(root).try_for_each(there));
        checked.err().map(|why| unusable(name, &why))
    }

    /// vCPUs, chips and devices.
    pub fn state(&self) -> PathBuf {
        self.folder.join("state")
    }

    /// RAM.
    pub fn memory(&self) -> PathBuf {
        memory::file_in(&self.folder, self.manifest.memory)
    }

    /// The root file system.
    pub fn root(&self) -> PathBuf {
        self.folder.join(ROOT)
    }

    /// A volume's clone.
    pub fn volume(&self, name: &str) -> PathBuf {
        volume_in(&self.folder, name)
    }

    /// Which chunks the first restore touched.
    pub fn recording(&self) -> PathBuf {
        self.folder.join("recording")
    }

    /// Whether RAM is a raw file that VMMs map.
    pub fn is_mapped(&self) -> bool {
        self.manifest.memory == MemoryForm::Raw
    }

    /// Whether this snapshot's RAM is an ancestor of the other one's.
    pub fn is_base_of(&self, other: &Saved) -> bool {
        use std::os::unix::fs::MetadataExt;
        let number = |path: &Path| {
            let metadata = std::fs::metadata(path).ok()?;
            Some((metadata.dev(), metadata.ino()))
        };
        let ours = number(&self.memory());
        let mut bases = memory::bases_in(&other.folder).into_iter();
        ours.is_some() && bases.any(|base| number(&base) == ours)
    }

    /// As the API shows it.
    pub fn shown(&self, name: &str, golden: bool, used_by: Vec<String>) -> Snapshot {
        let manifest = &self.manifest;
        let spec = &manifest.spec;
        let command = spec.command.as_ref().filter(|_| manifest.has_main());
        Snapshot {
            name: name.to_owned(),
            golden,
            created: manifest.created,
            vm: manifest.vm.clone(),
            parent: manifest.parent.clone(),
            image: spec.image.clone(),
            image_digest: manifest.image_digest.clone(),
            kernel: spec.kernel.clone(),
            kernel_digest: manifest.kernel_digest.clone(),
            initramfs_digest: manifest.initramfs_digest.clone(),
            cpus: spec.cpus,
            memory_mib: spec.memory_mib,
            command: command.map(|command| command.argv.clone()),
            tty: command.is_some_and(|command| command.tty.is_some()),
            volumes: spec.disks.clone(),
            cpu_features: manifest.cpu_features.clone(),
            memory: manifest.memory,
            memory_bytes: manifest.memory_bytes,
            shared_bytes: manifest.shared_bytes,
            other_bytes: manifest.other_bytes,
            optimised: manifest.optimised,
            used_by,
            children: Vec::new(),
            error: self.problem(name),
        }
    }
}

/// The message about a snapshot that can't be used.
pub fn unusable(name: &str, why: &str) -> String {
    format!("The snapshot {name} can't be used: {why}.")
}

fn prefault_in(folder: &Path) -> PathBuf {
    folder.join("prefault.json")
}

fn accessed_in(folder: &Path) -> PathBuf {
    folder.join("accessed.json")
}

/// Ranges within RAM, sorted and merged; none if they are too large in all.
fn merged_and_bounded(mut ranges: Vec<Extent>, ram: u64) -> Vec<Extent> {
    ranges.sort_by_key(|range| range.offset);
    let mut merged: Vec<Extent> = Vec::new();
    for range in ranges {
        let Some(end) = range.offset.checked_add(range.length) else {
            return Vec::new();
        };
        match merged.last_mut() {
            Some(last) if range.offset <= last.offset + last.length + PREFAULT_GAP => {
                last.length = last.length.max(end - last.offset);
            }
            _ => merged.push(range),
        }
    }
    let all: u64 = merged.iter().map(|range| range.length).sum();
    let within = merged
        .last()
        .is_none_or(|last| last.offset + last.length <= ram);
    if within && all <= ram / PREFAULT_SHARE {
        merged
    } else {
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_store::{WriteOptions, write_image};
    use std::fs;

    #[test]
    fn a_snapshot_that_lacks_one_of_its_disks_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let manifest = include_str!("../../golden/snapshot-1.json");
        fs::write(path("snapshot.json"), manifest).unwrap();
        fs::write(path("state"), jiffy_wire::state::seal("0.2.0", b"state")).unwrap();
        let ram = [7_u8; 8192];
        write_image(&path("ram.image"), &ram[..], &WriteOptions::default()).unwrap();
        fs::create_dir(path("volumes")).unwrap();
        let saved = Saved::open(folder.path().to_owned()).unwrap();
        let disks = [saved.volume("data"), saved.volume(roots::NAME)];
        for disk in &disks {
            fs::write(disk, "a disk").unwrap();
        }
        assert_eq!(saved.problem("one"), None);
        for disk in &disks {
            fs::remove_file(disk).unwrap();
            let problem = saved.problem("one").unwrap();
            assert!(problem.contains(disk.to_str().unwrap()), "{problem}");
            fs::write(disk, "a disk").unwrap();
        }
    }

    #[test]
    fn ranges_are_merged_and_bounded() {
        let range = |offset, length| Extent { offset, length };
        let merged = merged_and_bounded(
            vec![
                range(0x9000, 0x1000),
                range(0, 0x1000),
                range(0x2000, 0x1000),
            ],
            1 << 20,
        );
        assert_eq!(merged, [range(0, 0x3000), range(0x9000, 0x1000)]);
        assert!(merged_and_bounded(vec![range(0, 1 << 19)], 1 << 20).is_empty());
        assert!(merged_and_bounded(vec![range(1 << 20, 0x1000)], 1 << 20).is_empty());
        assert!(merged_and_bounded(vec![range(u64::MAX, 2)], 1 << 20).is_empty());
    }
}
