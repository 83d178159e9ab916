//! A VM's own root disk, which takes the changes to its root file system.
//!
//! Without one, changes are kept in the guest's memory. A *layer* is an empty file system that
//! the guest mounts over the read-only image; making it costs a few writes, whatever its size and
//! whatever the file system of the image. A *copy* is a clone of the whole image that shares its
//! blocks (ioctl_ficlone(2)); the image must be a writable file system.
//!
//! The file is in the folder of the VM's volume clones, under a name that no volume can have: it
//! is captured with them, and cloned for forks.

use crate::clock::unix_seconds;
use crate::durable;
use crate::error::{Error, Result};
use crate::model::vm::{Root, Spec};
use crate::paths::{make_volumes, volume_in};
use crate::room::disk::Room;
use jiffy_ext4::layout::MOST_BYTES;
use jiffy_wire::api::RootDisk;
use jiffy_wire::vmm::Disk;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Name of the root disk among a VM's volumes.
pub const NAME: &str = ".root";
/// Least size of a layer, in MiB: with a journal.
const LEAST_MIB: u64 = 16;
/// Most, in MiB.
const MOST_MIB: u64 = MOST_BYTES >> 20;

/// The disk's file in a VM's folder.
pub fn file_in(folder: &Path) -> PathBuf {
    volume_in(folder, NAME)
}

/// Checks the size of a root disk.
///
/// # Errors
///
/// If a layer has less than 16 MiB, or more than an ext4 file system can have.
pub fn check(wanted: &RootDisk) -> Result<()> {
    match wanted {
        RootDisk::Layer { size_mib } if !(LEAST_MIB..=MOST_MIB).contains(size_mib) => {
            Err(Error::invalid(format!(
                "A root disk of {size_mib} MiB can't be made; it has {LEAST_MIB} to {MOST_MIB} MiB."
            )))
        }
        _ => Ok(()),
    }
}

/// Makes a VM's root disk in its folder: blocking.
///
/// # Errors
///
/// If the file can't be made, or the image to copy is not ext4 or can't be cloned. If a plain copy
/// is allowed instead: if there is no room for it. No disk is left.
pub fn make(folder: &Path, spec: &Spec, image: &Path, room: &Room) -> Result<()> {
    let Some(wanted) = &spec.root_disk else {
        return Ok(());
    };
    let path = file_in(folder);
    let failed = |error: io::Error| Error::io("make the VM's root disk", &path, &error);
    make_volumes(folder).map_err(failed)?;
    let made = match wanted {
        // The layer lives as long as its VM and never grows, so it needs no superblock copies.
        RootDisk::Layer { size_mib } => empty(&path, size_mib << 20, "root", false).map_err(failed),
        RootDisk::Copy { plainly } => copy(&spec.image, image, &path, plainly.then_some(room)),
    };
    let made = made.and_then(|file| {
        // A VM that is removed when it ends does not survive a crash of the host: no sync.
        match spec.remove {
            true => Ok(()),
            false => file.sync_all().map_err(failed),
        }
    });
    made.inspect_err(|_| {
        let _ = fs::remove_file(&path);
    })
}

/// Checks that a VM has its root disk.
///
/// # Errors
///
/// If the root disk is missing or empty, or can't be looked at.
pub fn check_own(folder: &Path, vm: &str, spec: &Spec) -> Result<()> {
    if spec.root_disk.is_none() {
        return Ok(());
    }
    durable::check_not_empty(&file_in(folder)).map_err(|why| {
        Error::internal(format!(
            "The root disk of the VM {vm} can't be used: {why}."
        ))
        .hint(format!("Remove the VM with `jiffy rm --force {vm}`."))
    })
}

/// A new file of `bytes` bytes with an empty ext4 file system, with or without copies of its
/// superblock.
///
/// # Errors
///
/// If `path` exists, the file can't be written, or an ext4 file system can't have that size.
pub fn empty(path: &Path, bytes: u64, label: &str, copies: bool) -> io::Result<File> {
    let mut random = [0; 32];
    getrandom::fill(&mut random).map_err(io::Error::other)?;
    let [uuid, hash_seed] = [&random[..16], &random[16..]].map(|half| {
        let mut bytes = [0; 16];
        bytes.copy_from_slice(half);
        bytes
    });
    let file = new_file(path)?;
    let options = jiffy_ext4::Options {
        bytes,
        uuid,
        hash_seed,
        label: label.to_owned(),
        created: u32::try_from(unix_seconds()).unwrap_or(u32::MAX),
        copies,
    };
    jiffy_ext4::format(&file, &options).map_err(|error| match error {
        jiffy_ext4::FormatError::Write(error) => error,
        other => io::Error::new(io::ErrorKind::InvalidInput, other),
    })?;
    Ok(file)
}

fn new_file(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
}

fn copy(name: &str, image: &Path, path: &Path, plainly: Option<&Room>) -> Result<File> {
    let failed = |error: io::Error| Error::io("copy the image", path, &error);
    if fstype_of(image) != "ext4" {
        return Err(Error::invalid(format!(
            "The image {name} can't be copied for writing: its file system, EROFS, is always read-only."
        ))
        .hint("Ask for a writable layer over it with --root-disk=SIZE, or import an ext4 file system as an image."));
    }
    let source = open(image).map_err(failed)?;
    let mut target = new_file(path).map_err(failed)?;
    match rustix::fs::ioctl_ficlone(&target, &source) {
        Ok(()) => Ok(target),
        Err(rustix::io::Errno::NOSPC) => Err(failed(rustix::io::Errno::NOSPC.into())),
        Err(error) => {
            let bytes = source.metadata().map_err(failed)?.len();
            if let Some(room) = plainly {
                let _room = room.reserve_bytes(path, "The copy of the image needs up to", bytes)?;
                io::copy(&mut &source, &mut target).map_err(failed)?;
                return Ok(target);
            }
            let mib = bytes >> 20;
            Err(Error::wrong_state(format!(
                "The image {name} can't be cloned for the VM: the file system that holds {} can't clone files ({error}).",
                image.display()
            ))
            .hint(format!(
                "Copy its {mib} MiB with --copy, keep Jiffy's data on XFS or Btrfs, or ask for a layer with --root-disk=SIZE."
            )))
        }
    }
}

/// The kind of file system that a VM's image holds.
pub fn fstype(root: &Root) -> &'static str {
    match &root.lazy {
        None => fstype_of(&root.path),
        Some(disk) if disk.ext4 => "ext4",
        Some(_) => "erofs",
    }
}

/// Opens an image's file; waits for a file lease (fcntl(2), F_SETLEASE) to be broken.
fn open(image: &Path) -> io::Result<File> {
    jiffy_sys::regular::look(image)?;
    File::open(image)
}

/// The kind of file system that is in a file.
fn fstype_of(image: &Path) -> &'static str {
    match open(image).and_then(|file| jiffy_ext4::inspect(&file)) {
        Ok(Some(_)) => "ext4",
        _ => "erofs",
    }
}

/// All disks of a VM, in the order in which the guest finds them: what its
/// root is made from, its volumes, and the layer over the root.
pub fn disks(folder: &Path, spec: &Spec, image: PathBuf, volumes: Vec<Disk>) -> Vec<Disk> {
    let disk = |path: PathBuf, read_only: bool, serial: &str| Disk {
        path,
        read_only,
        serial: Some(serial.to_owned()),
        ..Disk::default()
    };
    let own = |serial| disk(file_in(folder), false, serial);
    let shared = || disk(image, true, "root");
    let (first, last) = match &spec.root_disk {
        None => (shared(), None),
        Some(RootDisk::Layer { .. }) => (shared(), Some(own("root-layer"))),
        Some(RootDisk::Copy { .. }) => (own("root"), None),
    };
    let mut disks = vec![first];
    disks.extend(volumes);
    disks.extend(last);
    disks
}

/// The disks of which the guest makes its root file system.
pub fn guest_root(spec: &Spec, fstype: &str) -> jiffy_wire::guest::Root {
    use jiffy_wire::guest::Root;
    let device = device(0);
    match &spec.root_disk {
        Some(RootDisk::Copy { .. }) => Root::Disk {
            device,
            fstype: "ext4".into(),
            read_only: false,
        },
        other => Root::Overlay {
            device,
            fstype: fstype.into(),
            upper: other
                .as_ref()
                .map(|_| (self::device(spec.disks.len() + 1), "ext4".into())),
        },
    }
}

/// The name of a guest's disk.
pub fn device(index: usize) -> String {
    let letter = char::from(b'a' + u8::try_from(index).unwrap_or(25).min(25));
    format!("/dev/vd{letter}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_wire::api::{ErrorKind, VolumeUse};
    use std::os::unix::fs::MetadataExt;

    fn spec(root_disk: RootDisk) -> Spec {
        Spec {
            root_disk: Some(root_disk),
            disks: vec![VolumeUse {
                name: "data".into(),
                ..VolumeUse::default()
            }],
            ..Spec::default()
        }
    }

    #[test]
    fn a_layer_is_a_file_system_of_holes_over_the_image() {
        let folder = tempfile::tempdir().unwrap();
        let spec = spec(RootDisk::Layer { size_mib: 4096 });
        make(folder.path(), &spec, Path::new("/image"), &Room::default()).unwrap();
        let path = file_in(folder.path());
        let metadata = fs::metadata(&path).unwrap();
        assert_eq!(metadata.len(), 4 << 30);
        assert!(metadata.blocks() * 512 < 1 << 20);
        assert_eq!(fstype_of(&path), "ext4");

        let volume = Disk::default();
        let disks = disks(folder.path(), &spec, "/image".into(), vec![volume.clone()]);
        assert_eq!(disks[0].path, Path::new("/image"));
        assert!(disks[0].read_only);
        assert_eq!(disks[1], volume);
        assert_eq!((&disks[2].path, disks[2].read_only), (&path, false));
        let jiffy_wire::guest::Root::Overlay { upper, .. } = guest_root(&spec, "erofs") else {
            panic!("no overlay");
        };
        assert_eq!(upper, Some(("/dev/vdc".into(), "ext4".into())));
    }

    #[test]
    fn a_root_is_reflinked_and_copied_in_full_only_on_request() {
        let (folder, room) = (tempfile::tempdir().unwrap(), Room::default());
        let image = folder.path().join("image");
        empty(&image, 16 << 20, "x", true).unwrap();
        let vm = folder.path().join("vm");
        fs::create_dir(&vm).unwrap();
        let clone = make(&vm, &spec(RootDisk::Copy { plainly: false }), &image, &room);
        match clone {
            Ok(()) => fs::remove_file(file_in(&vm)).unwrap(),
            Err(error) => {
                assert_eq!(error.0.kind, ErrorKind::WrongState);
                assert!(error.0.hint.unwrap().contains("--copy"));
                assert!(!file_in(&vm).exists());
            }
        }
        let spec = spec(RootDisk::Copy { plainly: true });
        make(&vm, &spec, &image, &room).unwrap();
        let path = file_in(&vm);
        assert_eq!(fs::read(&path).unwrap(), fs::read(&image).unwrap());
        let disks = disks(&vm, &spec, image, Vec::new());
        assert_eq!(disks.len(), 1);
        assert_eq!((&disks[0].path, disks[0].read_only), (&path, false));
    }

    #[test]
    fn a_read_only_image_is_not_copied() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("image");
        fs::write(&image, [0; 4096]).unwrap();
        let refused = make(
            folder.path(),
            &spec(RootDisk::Copy { plainly: true }),
            &image,
            &Room::default(),
        );
        assert!(refused.unwrap_err().0.message.contains("EROFS"));
        assert!(!file_in(folder.path()).exists());
    }

    #[test]
    fn odd_sizes_are_refused() {
        for size_mib in [0, LEAST_MIB - 1, MOST_MIB + 1, u64::MAX] {
            assert!(check(&RootDisk::Layer { size_mib }).is_err());
        }
        check(&RootDisk::Layer { size_mib: 4096 }).unwrap();
    }
}
