//! Snapshots to and from registries (`docs/registry-artifacts.md`).
//!
//! A pulled snapshot has its state, and the tables that locate the chunks of RAM and root file
//! system. The pager fetches the chunks as the VM needs them, beginning with those that the first
//! restore needed.

use super::disks::MAX_SIZE;
use super::memory;
use super::saved::Saved;
use crate::error::{Error, Result};
use crate::images::artifact::{self, json};
use crate::images::chunks::{DATA, parse_id, with_origin};
use crate::model::artifact::{SnapshotArtifact, VolumeArtifact};
use crate::paths::Paths;
use crate::records;
use crate::room::disk::Room;
use jiffy_registry::artifact::{Config, FileToPush};
use jiffy_store::ImageReader;
use jiffy_store::partial::is_partial;
use jiffy_wire::api::{MemoryForm, RootDisk};
use jiffy_wire::pager::Origin;
use std::path::{Path, PathBuf};

/// The media type of the configuration blob.
const CONFIG_TYPE: &str = "application/vnd.jiffy.snapshot.config.v1+json";
/// vCPUs, chips and devices.
pub const STATE: &str = "state";
/// RAM.
pub const MEMORY: &str = "ram.image";
/// Largest state that is taken, bytes.
pub const MAX_STATE: u64 = 64 << 20;
/// Bytes of a sector; a disk's size is a multiple of it.
const SECTOR: u64 = 512;

impl SnapshotArtifact {
    /// Checks that a snapshot can be pushed.
    ///
    /// # Errors
    ///
    /// If RAM is not an image of chunks, or only parts of it are here.
    pub fn check(saved: &Saved) -> Result<()> {
        let manifest = &saved.manifest;
        if manifest.memory != MemoryForm::Image {
            return Err(Error::wrong_state("A golden snapshot can't be pushed."));
        }
        if is_partial(&saved.memory()) {
            return Err(Error::wrong_state(
                "A snapshot of which only parts are here can't be pushed.",
            )
            .hint("It is in a registry already: copy it from there."));
        }
        Ok(())
    }

    /// The configuration of a snapshot with these chunks of its root file system and these images
    /// of its VM's own disks.
    ///
    /// # Errors
    ///
    /// As for [`check`](SnapshotArtifact::check), or if RAM's image can't be read.
    pub fn of(
        saved: &Saved,
        chunks: Vec<String>,
        root_disk: Option<String>,
        volumes: Vec<VolumeArtifact>,
    ) -> Result<SnapshotArtifact> {
        SnapshotArtifact::check(saved)?;
        let image = ImageReader::open(&saved.memory())
            .map_err(|error| Error::internal(format!("The snapshot can't be read: {error}.")))?;
        let mut manifest = saved.manifest.clone();
        // Valid on this host only.
        manifest.files.clear();
        manifest.source = None;
        manifest.lazy_root = None;
        manifest.spec.from = None;
        manifest.spec.own_volumes = false;
        // RAM is pushed without ancestors.
        manifest.shared_bytes = 0;
        Ok(SnapshotArtifact {
            manifest,
            memory: image.id().to_string(),
            chunks,
            root_disk,
            volumes,
        })
    }

    /// Reads and checks a blob of a registry.
    ///
    /// # Errors
    ///
    /// If the bytes are not such JSON, or have a value that no snapshot can have which is restored
    /// here.
    pub fn read(bytes: &[u8]) -> Result<SnapshotArtifact> {
        let read: records::artifact::SnapshotArtifact =
            serde_json::from_slice(bytes).map_err(|error| {
                Error::invalid(format!(
                    "The artifact's configuration is not that of a snapshot: {error}."
                ))
            })?;
        let read = SnapshotArtifact::from(read);
        let wrong = |what: &str| Err(Error::invalid(format!("The snapshot {what}.")));
        let spec = &read.manifest.spec;
        // Terminals show them.
        crate::names::check_vm(&read.manifest.vm)?;
        let shown = read
            .manifest
            .parent
            .iter()
            .chain(&read.manifest.cpu_features);
        if shown.flat_map(|text| text.chars()).any(char::is_control) {
            return wrong("names its parent or a processor's feature with control characters");
        }
        if spec.folders.iter().any(|folder| !folder.source.is_empty()) {
            // It would be a folder of this host.
            return wrong("names a folder of its host, which no snapshot does");
        }
        crate::checks::check_places(&spec.folders)?;
        crate::checks::check_volumes(&spec.disks)?;
        let names = spec.disks.iter().map(|disk| &disk.name);
        if !names.eq(read.volumes.iter().map(|volume| &volume.name)) || spec.own_volumes {
            return wrong("has volumes that do not match its configuration");
        }
        let odd = |size: u64| size == 0 || size > MAX_SIZE || !size.is_multiple_of(SECTOR);
        if read.volumes.iter().any(|volume| odd(volume.size)) {
            return wrong("has a volume of an invalid size");
        }
        if spec.root_disk.is_some() != read.root_disk.is_some() {
            return wrong("has a root disk without a configuration, or the reverse");
        }
        if let Some(wanted) = &spec.root_disk {
            crate::roots::check(wanted)?;
            if matches!(wanted, RootDisk::Layer { size_mib } if size_mib << 20 > MAX_SIZE) {
                return wrong("has a root disk of an invalid size");
            }
        }
        if spec.hidden || spec.from.is_some() || spec.init.is_some() {
            return wrong("is of a VM that can't be restored here");
        }
        if read.manifest.memory != MemoryForm::Image || read.manifest.lazy_root.is_some() {
            return wrong("has memory in a form that can't be pulled");
        }
        if read.chunks.is_empty() || read.chunks.len() > 64 {
            return wrong("has no valid list of the chunks of its root file system");
        }
        parse_id(&read.memory)?;
        let volumes = read.volumes.iter().map(|volume| &volume.image);
        for id in read.chunks.iter().chain(&read.root_disk).chain(volumes) {
            parse_id(id)?;
        }
        crate::checks::check_parts(spec)?;
        Ok(read)
    }

    /// The blob.
    ///
    /// # Errors
    ///
    /// If it can't be written as JSON.
    pub fn blob(&self) -> Result<Config> {
        Ok(Config {
            media_type: CONFIG_TYPE.to_owned(),
            bytes: json(&records::artifact::SnapshotArtifact::from(self.clone()))?,
        })
    }
}

/// The files of a snapshot, except its disks: blocking. RAM that has ancestors, or refers to the
/// root file system, is first written whole into `scratch`, with room for it.
///
/// # Errors
///
/// If RAM's image can't be read, or there is no room to write it whole.
pub fn files(saved: &Saved, room: &Room, scratch: &Path) -> Result<Vec<FileToPush>> {
    let mut path = saved.memory();
    let open = |path: &Path| {
        ImageReader::open(path)
            .map_err(|error| Error::internal(format!("The snapshot can't be read: {error}.")))
    };
    let mut image = open(&path)?;
    if image.parent().is_some() || image.backing().is_some() {
        let bytes = saved.manifest.memory_bytes + saved.manifest.shared_bytes;
        let _room = room.reserve_bytes(scratch, "The push needs about", bytes)?;
        path = scratch.join(MEMORY);
        memory::write_whole(&image, &path)?;
        image = open(&path)?;
    }
    let tail = image.file_bytes() + 64 - image.metadata_bytes();
    Ok(vec![
        FileToPush::local(STATE, saved.state(), DATA),
        artifact::cut(MEMORY, path, image.hot_range().end, tail),
    ])
}

/// Begins the image of RAM in a snapshot's new folder: blocking.
///
/// # Errors
///
/// If `id` is no id, `tail` is not that of the image, or a file can't be written.
pub fn begin_memory(
    folder: &Path,
    id: &str,
    length: u64,
    tail: &[u8],
    origins: &[Origin],
) -> Result<()> {
    let path = memory::file_in(folder, MemoryForm::Image);
    save_origins(&path, origins)?;
    jiffy_store::partial::create(&path, length, tail, parse_id(id)?)
        .map_err(|error| memory::write_failed(&path, &error))
}

/// Origins of the missing chunks of an image of RAM; empty if it is complete.
pub fn origins(memory: &Path, paths: &Paths) -> Vec<Origin> {
    if !is_partial(memory) {
        return Vec::new();
    }
    let peer = paths.peer.clone().map(|folder| Origin::Folder { folder });
    peer.into_iter().chain(known_origins(memory)).collect()
}

/// Adds an origin of the missing chunks of an image of RAM, or replaces its access: blocking.
///
/// # Errors
///
/// If the file of origins can't be written.
pub fn add_origin(memory: &Path, origin: Origin) -> Result<()> {
    save_origins(memory, &with_origin(&known_origins(memory), origin))
}

fn known_origins(memory: &Path) -> Vec<Origin> {
    records::origins::load(&origins_file(memory)).unwrap_or_default()
}

fn save_origins(memory: &Path, origins: &[Origin]) -> Result<()> {
    records::origins::save(&origins_file(memory), origins)
        .map_err(|error| Error::io("write the origins of a snapshot's memory", memory, &error))
}

fn origins_file(memory: &Path) -> PathBuf {
    memory.with_file_name("origins.json")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_root_disk_is_no_larger_than_one_that_is_pushed() {
        let golden = include_str!("../../golden/snapshot-artifact-1.json");
        let read = |mib: u64| {
            let artifact = golden
                .replace(r#""own_volumes":true"#, r#""own_volumes":false"#)
                .replace(r#"{"size_mib":64}"#, &format!(r#"{{"size_mib":{mib}}}"#));
            assert_ne!(golden, artifact);
            let error = SnapshotArtifact::read(artifact.as_bytes()).unwrap_err();
            error.to_string()
        };
        let most = MAX_SIZE >> 20;
        assert!(!read(most).contains("root disk"), "{}", read(most));
        let error = read(most + 1);
        assert!(error.contains("root disk of an invalid size"), "{error}");
    }

    #[test]
    fn names_that_a_terminal_would_obey_are_refused() {
        let golden = include_str!("../../golden/snapshot-artifact-1.json");
        for (from, to) in [
            (r#""vm":"web""#, r#""vm":"\u001b[2J""#),
            (r#""parent":"warm""#, r#""parent":"\u001b[2J""#),
        ] {
            let hostile = golden.replacen(from, to, 1);
            assert_ne!(golden, hostile);
            let error = SnapshotArtifact::read(hostile.as_bytes()).unwrap_err();
            assert!(!error.to_string().contains("volumes"), "{error}");
        }
    }

    #[test]
    fn a_snapshot_may_say_where_folders_were_but_not_which() {
        let golden = include_str!("../../golden/snapshot-artifact-1.json");
        let read = |folders: &str| {
            let folders = format!(r#""folders":[{folders}],"kernel":"#);
            let artifact = golden.replacen(r#""kernel":"#, &folders, 1);
            assert_ne!(golden, artifact);
            let error = SnapshotArtifact::read(artifact.as_bytes()).unwrap_err();
            error.to_string()
        };
        // What is wrong with it for another reason.
        let otherwise = SnapshotArtifact::read(golden.as_bytes()).unwrap_err();
        let place = r#"{"source":"","mount":"/src"}"#;
        assert_eq!(read(place), otherwise.to_string());
        let error = read(r#"{"source":"/","mount":"/host"}"#);
        assert!(error.contains("names a folder of its host"), "{error}");
        let error = read(r#"{"source":"","mount":"src"}"#);
        assert!(error.contains("src"), "{error}");
        let error = read(&format!("{place},{place}"));
        assert!(error.contains("Two folders"), "{error}");
        let error = read(&[place; 100].join(","));
        assert!(error.contains("100 folders"), "{error}");
    }
}
