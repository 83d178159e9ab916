//! Writable disks of a snapshot's VM in registries (`docs/registry-artifacts.md`): its own root
//! disk and its volumes. Each is pushed as an image of chunks, like RAM.
//!
//! VMs write to these disks as plain files, so a pull fetches them completely, not on demand. Of
//! a copy of an image only the differences are pushed.

use super::memory::unpack;
use crate::error::of_registry;
use crate::error::{Error, Result};
use crate::images::artifact::{self, file_of};
use crate::images::chunks::{Chunks, damaged};
use crate::model::artifact::VolumeArtifact;
use crate::paths::volume_in;
use crate::room::disk::Room;
use crate::roots;
use jiffy_registry::artifact::FileToPush;
use jiffy_registry::{RemoteArtifact, RemoteFile};
use jiffy_store::ImageReader;
use jiffy_wire::api::RootDisk;
use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// The root disk's file in an artifact.
pub const ROOT_FILE: &str = "root-disk.image";
/// Largest disk that is pushed and pulled, bytes.
pub const MAX_SIZE: u64 = artifact::MAX_SIZE;
/// Besides its chunks an image has tables, at most one part in this many of its size.
const TABLES: u64 = 64;
/// Most bytes of header, footer and the rest of the last chunk.
const ENDS: u64 = 4 << 20;

/// A volume's file in an artifact.
pub fn volume_file(name: &str) -> String {
    format!("volume-{name}.image")
}

/// Cuts a root disk of this kind into chunks, in a file in `folder`, and returns its id:
/// blocking. `image` are the chunks of the VM's root file system.
///
/// # Errors
///
/// If the disk is empty or over [`MAX_SIZE`], can't be read, or its image can't be written, such as
/// for lack of room.
pub fn cut_root(
    disk: &Path,
    kind: &RootDisk,
    chunks: (&Chunks, &Room),
    image: &[String],
    folder: &Path,
) -> Result<(String, FileToPush)> {
    size_to_push(disk, "root disk")?;
    cut(
        disk,
        parents(kind, image).first(),
        chunks,
        folder,
        ROOT_FILE,
    )
}

/// As [`cut_root`], for a volume.
///
/// # Errors
///
/// As for [`cut_root`].
pub fn cut_volume(
    disk: &Path,
    name: &str,
    chunks: (&Chunks, &Room),
    folder: &Path,
) -> Result<(VolumeArtifact, FileToPush)> {
    let size = size_to_push(disk, &format!("volume {name}"))?;
    let (image, file) = cut(disk, None, chunks, folder, &volume_file(name))?;
    let name = name.to_owned();
    Ok((VolumeArtifact { name, size, image }, file))
}

/// The size of a disk, unless no disk of that size is pushed.
fn size_to_push(disk: &Path, what: &str) -> Result<u64> {
    let failed = |error: io::Error| Error::io("look at a VM's disk", disk, &error);
    let size = fs::metadata(disk).map_err(failed)?.len();
    if size == 0 || size > MAX_SIZE {
        return Err(Error::wrong_state(format!(
            "The snapshot can't be pushed: its {what} has {size} bytes; at most {MAX_SIZE} are pushed."
        )));
    }
    Ok(size)
}

fn cut(
    disk: &Path,
    parent: Option<&String>,
    (chunks, room): (&Chunks, &Room),
    folder: &Path,
    file: &str,
) -> Result<(String, FileToPush)> {
    let path = folder.join(file);
    let id = chunks.write(room, disk, parent.map(String::as_str), None, &path)?;
    let (boot, tail) = chunks.cuts_of(&path)?;
    Ok((id, artifact::cut(file, path, boot, tail)))
}

/// The images that a root disk of this kind is built on.
fn parents<'a>(kind: &RootDisk, image: &'a [String]) -> &'a [String] {
    match kind {
        RootDisk::Layer { .. } => &[],
        RootDisk::Copy { .. } => image,
    }
}

/// A disk that is being pulled.
pub struct Pulled<'a> {
    artifact: &'a RemoteArtifact,
    file: &'a RemoteFile,
    /// Its name in messages.
    what: String,
    /// Its name among the VM's volumes.
    name: &'a str,
    id: &'a str,
    size: Size,
    parents: &'a [String],
}

/// Whether all of an image is here.
fn is_whole(chunks: &Chunks, id: &str) -> bool {
    chunks.has(id) && !chunks.is_partial(id)
}

#[derive(Clone, Copy)]
enum Size {
    Exactly(u64),
    AtMost(u64),
}

impl<'a> Pulled<'a> {
    /// A root disk of this kind with this id; `image` are the chunks of the VM's root file system.
    /// Nothing is fetched yet.
    ///
    /// # Errors
    ///
    /// If the artifact has no such file, or a larger one than such a disk can have.
    pub fn root(
        artifact: &'a RemoteArtifact,
        kind: &RootDisk,
        id: &'a str,
        image: &'a [String],
    ) -> Result<Pulled<'a>> {
        Pulled {
            artifact,
            file: file_of(artifact, ROOT_FILE)?,
            what: "root disk".to_owned(),
            name: roots::NAME,
            id,
            size: match kind {
                RootDisk::Layer { size_mib } => Size::Exactly(size_mib << 20),
                RootDisk::Copy { .. } => Size::AtMost(MAX_SIZE),
            },
            parents: parents(kind, image),
        }
        .checked()
    }

    /// As [`Pulled::root`], for a volume.
    ///
    /// # Errors
    ///
    /// As for [`Pulled::root`].
    pub fn volume(artifact: &'a RemoteArtifact, volume: &'a VolumeArtifact) -> Result<Pulled<'a>> {
        Pulled {
            artifact,
            file: file_of(artifact, &volume_file(&volume.name))?,
            what: format!("volume {}", volume.name),
            name: &volume.name,
            id: &volume.image,
            size: Size::Exactly(volume.size),
            parents: &[],
        }
        .checked()
    }

    fn checked(self) -> Result<Pulled<'a>> {
        let (Size::Exactly(size) | Size::AtMost(size)) = self.size;
        if self.file.size() > size + size / TABLES + ENDS {
            return Err(Error::registry(format!(
                "The {} in the artifact {} has {} bytes in {}, more than a disk of {size} bytes can have.",
                self.what,
                self.artifact.reference(),
                self.file.size(),
                self.file.name(),
            )));
        }
        Ok(self)
    }

    /// Its name in messages.
    pub fn what(&self) -> &str {
        &self.what
    }

    /// Fetches the disk into a snapshot's new folder; returns the bytes fetched: blocking. The
    /// caller has reserved room for these, `unfetched`; the unpacked disk's is reserved here.
    ///
    /// # Errors
    ///
    /// If the registry can't be reached or refuses, what was fetched is damaged or not the disk
    /// that the snapshot names, there is no room, or a file can't be written.
    pub fn fetch(
        &self,
        (chunks, room): (&Chunks, &Room),
        unfetched: &AtomicU64,
        folder: &Path,
        progress: &dyn jiffy_registry::Progress,
    ) -> Result<u64> {
        let target = volume_in(folder, self.name);
        let failed = |error: io::Error| Error::io("store a VM's disk", &target, &error);
        let scratch = tempfile::tempdir_in(folder).map_err(failed)?;
        let mut fetched = 0;
        let mut fetch = |file: &RemoteFile| {
            fetched += file.size();
            let path = file.fetch(scratch.path(), progress);
            unfetched.fetch_sub(file.size(), Ordering::Relaxed);
            path.map_err(|error| of_registry(&error, scratch.path()))
        };
        let path = fetch(self.file)?;
        // Parents that this node has are not fetched.
        for id in self.parents {
            let name = Chunks::file_name(id);
            match is_whole(chunks, id) {
                true => {
                    let beside = scratch.path().join(name);
                    std::os::unix::fs::symlink(chunks.path(id), beside).map_err(failed)?;
                }
                false => drop(fetch(file_of(self.artifact, &name)?)?),
            }
        }
        let image = ImageReader::open(&path).map_err(|error| damaged(&error))?;
        self.check(&image)?;
        if let Some(parent) = target.parent() {
            fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(parent)
                .map_err(failed)?;
        }
        let needs = format!("The {} of the snapshot needs up to", self.what);
        unpack(&target, &image, room, &needs)?;
        Ok(fetched)
    }

    /// Bytes that are fetched, with those of its parents that this node lacks.
    ///
    /// # Errors
    ///
    /// If the artifact lacks the file of a parent that this node lacks, too.
    pub fn bytes(&self, chunks: &Chunks) -> Result<u64> {
        let mut bytes = self.file.size();
        for id in self.parents.iter().filter(|id| !is_whole(chunks, id)) {
            let parent = file_of(self.artifact, &Chunks::file_name(id))?;
            bytes = bytes.saturating_add(parent.size());
        }
        Ok(bytes)
    }

    /// Bytes that it takes in this folder.
    pub fn bytes_in(&self, folder: &Path) -> u64 {
        super::memory::bytes_of(&volume_in(folder, self.name)).unwrap_or(0)
    }

    /// Checks that the disk is the one the snapshot names, and fits the VM.
    fn check(&self, image: &ImageReader) -> Result<()> {
        let fits = match self.size {
            Size::Exactly(size) => image.size() == size,
            Size::AtMost(size) => image.size() <= size,
        };
        if image.id().to_string() == self.id && fits {
            return Ok(());
        }
        Err(Error::registry(format!(
            "The {} in the artifact {} is not the one that its snapshot names.",
            self.what,
            self.artifact.reference()
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::images::chunks::DATA;
    use crate::transfer::client::Access;
    use jiffy_registry::artifact::{Config, SNAPSHOT_TYPE};
    use jiffy_registry::testing::{LocalRegistry, RegistryOptions};
    use jiffy_registry::{Artifact, Reference};
    use jiffy_wire::api::{ErrorKind, RegistryAccess};
    use std::collections::BTreeMap;
    use std::os::unix::fs::FileExt;
    use std::sync::Arc;

    const IMAGE_BYTES: usize = 1 << 20;

    /// A registry, a node's chunks with an image of noise, and that image.
    struct Stage {
        _registry: LocalRegistry,
        folder: tempfile::TempDir,
        access: Access,
        reference: Reference,
        chunks: Chunks,
        image: Vec<String>,
        noise: Vec<u8>,
    }

    impl Stage {
        fn new() -> Stage {
            let registry = LocalRegistry::start(&RegistryOptions::default()).unwrap();
            let folder = tempfile::tempdir().unwrap();
            let reference: Reference =
                Reference::parse(&format!("{}/tests/disk:1", registry.host()), None).unwrap();
            let access = RegistryAccess::default();
            let access = Access::new(&access, &reference, folder.path()).unwrap();
            let chunks = Chunks::new(folder.path().to_owned());
            let mut noise = vec![0; IMAGE_BYTES];
            blake3::Hasher::new().finalize_xof().fill(&mut noise);
            let image = folder.path().join("image");
            fs::write(&image, &noise).unwrap();
            let image = chunks.make(&Room::default(), &image, None, None).unwrap().0;
            Stage {
                _registry: registry,
                folder,
                access,
                reference,
                chunks,
                image,
                noise,
            }
        }

        /// Pushes a disk; returns its id, the bytes of its file, and the artifact.
        fn push(&self, disk: &Path, kind: &RootDisk) -> (String, u64, RemoteArtifact) {
            let scratch = self.folder.path();
            let (id, file) = cut_root(
                disk,
                kind,
                (&self.chunks, &Room::default()),
                &self.image,
                scratch,
            )
            .unwrap();
            let mut files = vec![file];
            for id in &self.image {
                files.push(artifact::local_file(&self.chunks, id).unwrap());
            }
            let there = self.put(&files);
            (
                id,
                fs::metadata(scratch.join(ROOT_FILE)).unwrap().len(),
                there,
            )
        }

        /// Pushes these files.
        fn put(&self, files: &[FileToPush]) -> RemoteArtifact {
            let config = Config {
                media_type: "application/json".into(),
                bytes: b"{}".to_vec(),
            };
            let scratch = tempfile::tempdir().unwrap();
            Artifact::plan(SNAPSHOT_TYPE, config, BTreeMap::new(), files, &())
                .unwrap()
                .push(&self.access.client, &self.reference, scratch.path(), &())
                .unwrap();
            RemoteArtifact::open(&self.access.client, &self.reference, &()).unwrap()
        }

        /// Pulls the disk to an empty node.
        fn pull(&self, artifact: &RemoteArtifact, kind: &RootDisk, id: &str) -> Result<Vec<u8>> {
            Stage::fetch(&Pulled::root(artifact, kind, id, &self.image)?)
        }

        fn fetch(disk: &Pulled) -> Result<Vec<u8>> {
            Stage::fetch_into(disk, &Room::default())
        }

        fn fetch_into(disk: &Pulled, room: &Room) -> Result<Vec<u8>> {
            let (chunks, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
            let chunks = Chunks::new(chunks.path().to_owned());
            let unfetched = AtomicU64::new(disk.bytes(&chunks)?);
            disk.fetch((&chunks, room), &unfetched, to.path(), &())?;
            assert_eq!(unfetched.into_inner(), 0);
            assert!(disk.bytes_in(to.path()) > 0);
            let left: Vec<_> = fs::read_dir(to.path()).unwrap().collect();
            assert_eq!(left.len(), 1, "{left:?}");
            Ok(fs::read(volume_in(to.path(), disk.name)).unwrap())
        }
    }

    #[test]
    fn a_pulled_root_layer_must_match_its_id() {
        let stage = Stage::new();
        let disk = stage.folder.path().join("disk");
        let file = roots::empty(&disk, 64 << 20, "root", false).unwrap();
        file.write_all_at(b"what the VM wrote", 40 << 20).unwrap();
        let kind = RootDisk::Layer { size_mib: 64 };
        let (id, bytes, there) = stage.push(&disk, &kind);
        assert!(bytes < 64 << 10, "{bytes}");
        assert!(stage.pull(&there, &kind, &id).unwrap() == fs::read(&disk).unwrap());

        let larger = RootDisk::Layer { size_mib: 65 };
        for (kind, id) in [(&kind, &stage.image[0]), (&larger, &id)] {
            let refused = stage.pull(&there, kind, id).unwrap_err();
            assert!(refused.0.message.contains("not the one"), "{refused:?}");
        }

        file.set_len(MAX_SIZE + 512).unwrap();
        let room = Room::default();
        let chunks = (&stage.chunks, &room);
        let refused = cut_root(&disk, &kind, chunks, &stage.image, stage.folder.path());
        let error = refused.unwrap_err();
        assert!(error.0.message.contains("root disk"), "{error:?}");
    }

    #[test]
    fn a_pulled_disk_is_unpacked_only_if_it_fits() {
        let stage = Stage::new();
        let path = stage.folder.path().join("disk");
        fs::write(&path, vec![7; 4 << 20]).unwrap();
        let room = Room::default();
        let chunks = (&stage.chunks, &room);
        let (data, cut) = cut_volume(&path, "data", chunks, stage.folder.path()).unwrap();
        let there = stage.put(&[cut]);
        let disk = Pulled::volume(&there, &data).unwrap();
        assert!(disk.bytes(&stage.chunks).unwrap() < 64 << 10);
        // Whatever is free is another operation's.
        let unwritten = Arc::new(AtomicU64::new(0));
        let _others = room.reserve(stage.folder.path(), "It needs", unwritten.clone());
        unwritten.store(1 << 60, Ordering::Relaxed);
        let refused = Stage::fetch_into(&disk, &room).unwrap_err().0;
        assert_eq!(refused.kind, ErrorKind::NoRoom);
        let sentence = refused.message;
        assert!(
            sentence.starts_with("The volume data of the snapshot needs up to 4 MiB"),
            "{sentence}"
        );
        unwritten.store(0, Ordering::Relaxed);
        assert!(Stage::fetch_into(&disk, &room).unwrap() == [7; 4 << 20]);
    }

    #[test]
    fn a_pulled_volume_must_match_its_id() {
        let stage = Stage::new();
        let path = stage.folder.path().join("disk");
        let file = fs::File::create(&path).unwrap();
        // Not a multiple of the chunk size, and mostly holes.
        file.set_len((64 << 20) + 512).unwrap();
        file.write_all_at(b"what the VM wrote", 40 << 20).unwrap();
        file.write_all_at(b"the end", (64 << 20) + 505).unwrap();
        let folder = stage.folder.path();
        let room = Room::default();
        let chunks = (&stage.chunks, &room);
        let (data, cut) = cut_volume(&path, "data", chunks, folder).unwrap();
        assert_eq!((data.name.as_str(), data.size), ("data", (64 << 20) + 512));
        let small = folder.join("small");
        fs::write(&small, [7; 512]).unwrap();
        let (other, other_cut) = cut_volume(&small, "small", chunks, folder).unwrap();
        // The file of a large disk in place of a small one's.
        let lied = FileToPush::local(&volume_file("lied"), folder.join("image"), DATA);
        fs::write(folder.join("image"), vec![1; 8 << 20]).unwrap();
        let there = stage.put(&[cut, other_cut, lied]);
        let pull = |volume: &VolumeArtifact| Stage::fetch(&Pulled::volume(&there, volume)?);
        assert!(pull(&data).unwrap() == fs::read(&path).unwrap());
        assert_eq!(pull(&other).unwrap(), [7; 512]);

        let refused = |change: fn(&mut VolumeArtifact), why: &str| {
            let mut volume = data.clone();
            change(&mut volume);
            let error = pull(&volume).unwrap_err();
            assert!(error.0.message.contains(why), "{error:?}");
        };
        refused(|it| it.size -= 512, "not the one");
        refused(|it| it.image = "0".repeat(32), "not the one");
        refused(|it| it.name = "small".into(), "not the one");
        refused(|it| it.name = "none".into(), "no file volume-none.image");
        let lied = VolumeArtifact {
            name: "lied".into(),
            ..other
        };
        let error = pull(&lied).unwrap_err();
        assert!(
            error.0.message.contains("more than a disk of 512"),
            "{error:?}"
        );
        fs::write(&small, b"").unwrap();
        let error = cut_volume(&small, "small", chunks, folder).unwrap_err();
        assert!(error.0.message.contains("small"), "{error:?}");
    }

    #[test]
    fn only_the_changed_chunks_of_a_root_copy_are_pushed() {
        let stage = Stage::new();
        let disk = stage.folder.path().join("disk");
        let mut changed = stage.noise.clone();
        changed[500_000..500_010].fill(7);
        fs::write(&disk, &changed).unwrap();
        let kind = RootDisk::Copy { plainly: true };
        let (id, bytes, there) = stage.push(&disk, &kind);
        assert!(bytes < IMAGE_BYTES as u64 / 10, "{bytes}");
        assert!(stage.pull(&there, &kind, &id).unwrap() == changed);
        // A node without the image fetches it, too.
        let disk = Pulled::root(&there, &kind, &id, &stage.image).unwrap();
        assert_eq!(disk.bytes(&stage.chunks).unwrap(), bytes);
        let none = Chunks::new(stage.folder.path().join("none"));
        assert!(disk.bytes(&none).unwrap() > IMAGE_BYTES as u64 / 2);
    }
}
