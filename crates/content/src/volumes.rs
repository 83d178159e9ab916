//! Volumes: raw, sparse disk files that outlive VMs.

#[cfg(test)]
mod tests;

use crate::durable::{self, is_taken};
use crate::error::{Error, Result};
use crate::leases::{self, Held, Holder, Item, Leases, Mode};
use crate::names;
use crate::roots;
use jiffy_ext4::layout::{LEAST_BYTES, Layout, MOST_BYTES};
use jiffy_sys::regular;
use jiffy_wire::api::{Volume, VolumeUse};
use rustix::fs::{AtFlags, CWD, RenameFlags, SeekFrom};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Largest volume: 64 TiB, in MiB.
const MAX_MIB: u64 = 64 << 20;
/// What is done with a volume that is in nobody's use.
const REMOVED: &str = "removed";
/// Most volumes of one VM: `/dev/vdb` to `/dev/vdy`.
pub const MAX_PER_VM: usize = 24;

/// The volumes of a node.
#[derive(Debug)]
pub struct Volumes {
    folder: PathBuf,
    leases: Arc<Leases>,
}

/// A VM's hold on a volume; dropping it releases the volume.
#[derive(Debug)]
pub struct Lease {
    /// The volume's name.
    pub name: String,
    /// Its file.
    pub path: PathBuf,
    _lease: leases::Lease,
}

impl Volumes {
    /// The volumes in this folder.
    pub fn new(folder: PathBuf, leases: Arc<Leases>) -> Volumes {
        Volumes { folder, leases }
    }

    /// Checks what [`Volumes::create_missing`] checks, before anything is made.
    ///
    /// # Errors
    ///
    /// If a name or a size is not valid, a volume has another size or can't be used, or is missing
    /// and no size is given.
    pub fn check(&self, wanted: &[VolumeUse]) -> Result<()> {
        let mut all = wanted.iter();
        all.try_for_each(|volume| self.missing(volume).map(drop))
    }

    /// Makes the volumes of a new VM that don't exist yet; returns the names of those made. Other
    /// VMs can use the new volumes at once, so the caller can't undo this: it must be the last
    /// step.
    ///
    /// # Errors
    ///
    /// As for [`Volumes::check`], or if a volume can't be made. None of the new ones is left.
    pub fn create_missing(&self, wanted: &[VolumeUse]) -> Result<Vec<String>> {
        let mut made = Vec::new();
        for volume in wanted {
            match self.create_if_missing(volume) {
                Ok(true) => made.push(volume.name.clone()),
                Ok(false) => {}
                Err(error) => {
                    self.discard(&made);
                    return Err(error);
                }
            }
        }
        Ok(made)
    }

    /// Removes the volumes that a failed call has just made, unless a VM uses one already.
    fn discard(&self, made: &[String]) {
        for name in made {
            if let Ok(_lease) = self.exclusive(name, REMOVED) {
                let _ = fs::remove_file(self.path(name));
            }
        }
    }

    fn create_if_missing(&self, wanted: &VolumeUse) -> Result<bool> {
        let Some(mib) = self.missing(wanted)? else {
            return Ok(false);
        };
        let name = &wanted.name;
        self.make(name, mib << 20, false)
            .map_err(|error| Error::io("make a volume", &self.path(name), &error))
    }

    /// The size in MiB of a volume that must be made for this use.
    fn missing(&self, wanted: &VolumeUse) -> Result<Option<u64>> {
        let name = &wanted.name;
        names::check("volume", name)?;
        if let Some(size) = self.size(name)? {
            return match wanted.size_mib {
                Some(mib) if mib << 20 != size => Err(Error::conflict(format!(
                    "The volume {name} has {} MiB, not {mib} MiB.",
                    size >> 20
                ))
                .hint("Omit the size to use the volume as it is.")),
                _ => Ok(None),
            };
        }
        let Some(mib) = wanted.size_mib else {
            return Err(
                Error::not_found(format!("There is no volume {name}.")).hint(format!(
                    "Give a size in MiB to make it, as in `--disk {name}:1024`."
                )),
            );
        };
        check_size(mib)?;
        Ok(Some(mib))
    }

    /// Makes a volume that must not exist yet, with an ext4 file system unless
    /// it is to be raw: blocking.
    ///
    /// # Errors
    ///
    /// If the name or the size (MiB) is not valid, no file system fits in the size, there is such a
    /// volume, or the file can't be made.
    pub fn create(&self, name: &str, mib: u64, raw: bool) -> Result<()> {
        names::check("volume", name)?;
        check_size(mib)?;
        if !raw && Layout::of(mib << 20, true).is_none() {
            return Err(Error::invalid(format!(
                "No file system can be made on a volume of {mib} MiB; it must have {} to {} MiB.",
                LEAST_BYTES >> 20,
                MOST_BYTES >> 20
            ))
            .hint("Leave it empty with --raw."));
        }
        let made = self
            .make(name, mib << 20, raw)
            .map_err(|error| Error::io("make a volume", &self.path(name), &error))?;
        match made {
            true => Ok(()),
            false => Err(Error::conflict(format!("There is a volume {name} already."))
                .hint(format!("See `jiffy volume ls`, or change its size with `jiffy volume resize {name} SIZE`."))),
        }
    }

    /// Makes a volume, with a file system if one fits. False if somebody else made the volume
    /// meanwhile.
    fn make(&self, name: &str, bytes: u64, raw: bool) -> io::Result<bool> {
        let path = self.path(name);
        let temporary = self.folder.join(format!(".{name}.{}.tmp", names::suffix()));
        let made = contents(&temporary, name, bytes, raw)
            .and_then(|file| file.sync_all())
            .and_then(|()| {
                let flags = RenameFlags::NOREPLACE;
                match rustix::fs::renameat_with(CWD, &temporary, CWD, &path, flags) {
                    Ok(()) => Ok(true),
                    Err(rustix::io::Errno::EXIST) => Ok(false),
                    Err(error) => Err(error.into()),
                }
            });
        if !matches!(made, Ok(true)) {
            let _ = fs::remove_file(&temporary);
        }
        let made = made?;
        jiffy_sys::durable::sync_folder_of(&path)?;
        Ok(made)
    }

    /// Takes leases on the volumes for a VM that starts. A VM that writes excludes all others;
    /// any number of VMs may read.
    ///
    /// # Errors
    ///
    /// If another lease excludes a VM's use, or a volume was removed or can't be used.
    pub fn hold(&self, wanted: &[VolumeUse], vm: &str) -> Result<Vec<Lease>> {
        let mut leases = Vec::with_capacity(wanted.len());
        for volume in wanted {
            let name = &volume.name;
            let mode = match volume.read_only {
                true => Mode::Shared,
                false => Mode::Exclusive,
            };
            let holder = Holder::Vm(vm.to_owned());
            let lease = self.leases.take(item(name), mode, holder);
            leases.push(Lease {
                name: name.clone(),
                path: self.path(name),
                _lease: lease.map_err(|other| refused(name, &other))?,
            });
            // The lease is held, so the volume can't be removed from here on.
            if self.size(name)?.is_none() {
                return Err(Error::not_found(format!("The volume {name} was removed.")));
            }
        }
        Ok(leases)
    }

    /// Where a volume is.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path(name)
    }

    /// The names of the VMs that hold any of these volumes.
    pub fn users(&self, wanted: &[VolumeUse]) -> Vec<String> {
        let names = wanted.iter().map(|volume| &volume.name);
        names.flat_map(|name| self.users_of(name)).collect()
    }

    fn users_of(&self, name: &str) -> Vec<String> {
        let held = self.leases.of(&item(name)).into_iter();
        held.filter_map(|held| match &held.holder {
            Holder::Vm(vm) => Some(vm.clone()),
            Holder::Operation(_) => None,
        })
        .collect()
    }

    /// All volumes, by name.
    ///
    /// # Errors
    ///
    /// If the folder can't be read. A volume that can't be used is listed with the reason.
    pub fn list(&self) -> Result<Vec<Volume>> {
        let mut volumes = Vec::new();
        let entries = fs::read_dir(&self.folder)
            .map_err(|error| Error::io("list volumes", &self.folder, &error))?;
        for entry in entries.flatten() {
            let file = entry.file_name();
            let Some(name) = file.to_str().and_then(|file| file.strip_suffix(".img")) else {
                continue;
            };
            if names::check("volume", name).is_err() {
                continue;
            }
            let path = entry.path();
            let Ok(metadata) = fs::symlink_metadata(&path) else {
                continue;
            };
            let error = durable::check_not_empty(&path).err();
            volumes.push(Volume {
                name: name.to_owned(),
                size_mib: match error {
                    None => metadata.len() >> 20,
                    Some(_) => 0,
                },
                disk_bytes: metadata.blocks() * 512,
                used_by: self.users_of(name),
                attached_to: Vec::new(),
                error: error.map(|why| unusable(name, &why).0.message),
            });
        }
        volumes.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(volumes)
    }

    /// Changes the size of a volume that no VM holds: blocking. It shrinks only if nothing was ever
    /// written beyond the new end. Returns a note for the user about the file system on it.
    ///
    /// # Errors
    ///
    /// If the name or the size (MiB) is not valid, the volume is missing or in use, would lose
    /// data, or its file can't be changed.
    pub fn resize(&self, name: &str, mib: u64) -> Result<Option<String>> {
        names::check("volume", name)?;
        check_size(mib)?;
        let _lease = self.exclusive(name, "resized")?;
        self.resize_unused(name, mib)
    }

    /// A lease to change a volume that no VM holds and that nothing else changes.
    fn exclusive(&self, name: &str, operation: &'static str) -> Result<leases::Lease> {
        let holder = Holder::Operation(operation);
        let lease = self.leases.take(item(name), Mode::Exclusive, holder);
        lease.map_err(|other| match &other.holder {
            Holder::Vm(vm) => {
                Error::conflict(format!("The volume {name} is in use by the VM {vm}."))
                    .hint(format!("Stop that VM first with `jiffy stop {vm}`."))
            }
            Holder::Operation(other) => being_changed(name, other),
        })
    }

    fn resize_unused(&self, name: &str, mib: u64) -> Result<Option<String>> {
        let path = self.path(name);
        let failed = |error: io::Error| Error::io("resize a volume", &path, &error);
        let mut options = OpenOptions::new();
        let file = match regular::open_with(options.read(true).write(true), &path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(Error::not_found(format!("There is no volume {name}.")));
            }
            Err(error) => return Err(failed(error)),
        };
        let (old, new) = (file.metadata().map_err(failed)?.len(), mib << 20);
        let found = jiffy_ext4::inspect(&file).map_err(failed)?;
        if new < old {
            let reaches = found.is_some_and(|found| found.bytes > new);
            if reaches || has_data(&file, new).map_err(failed)? {
                let what = match reaches {
                    true => "its file system reaches",
                    false => "there is data",
                };
                return Err(Error::wrong_state(format!(
                    "The volume {name} can't shrink to {mib} MiB: {what} beyond that."
                ))
                .hint("Make a smaller volume and copy what is to be kept."));
            }
        }
        file.set_len(new)
            .and_then(|()| file.sync_all())
            .map_err(failed)?;
        let grows = found.is_some_and(|found| found.bytes < new);
        Ok((new > old && grows).then(|| {
            "Its file system grows when a VM mounts it with `--disk NAME,mount=PATH`; in a guest that mounts it itself, run resize2fs.".to_owned()
        }))
    }

    /// Removes a volume that no VM holds.
    ///
    /// # Errors
    ///
    /// If the name is not valid, the volume is missing or in use, or its file can't be removed.
    pub fn remove(&self, name: &str) -> Result<()> {
        names::check("volume", name)?;
        let _lease = self.exclusive(name, REMOVED)?;
        self.remove_unused(name)
    }

    fn remove_unused(&self, name: &str) -> Result<()> {
        let path = self.path(name);
        match rustix::fs::unlinkat(CWD, &path, AtFlags::empty()) {
            Ok(()) => Ok(()),
            // Not a volume, but a folder in its place.
            Err(rustix::io::Errno::ISDIR) => fs::remove_dir_all(&path)
                .map_err(|error| Error::io("remove a volume", &path, &error)),
            Err(rustix::io::Errno::NOENT) => {
                Err(Error::not_found(format!("There is no volume {name}.")))
            }
            Err(error) => Err(Error::io("remove a volume", &path, &error.into())),
        }
    }

    fn size(&self, name: &str) -> Result<Option<u64>> {
        let path = self.path(name);
        match durable::check_not_empty(&path) {
            Ok(()) => {
                let data = fs::metadata(&path);
                let data = data.map_err(|error| Error::io("look at a volume", &path, &error))?;
                Ok(Some(data.len()))
            }
            Err(_) if !is_taken(&path) => Ok(None),
            Err(why) => Err(unusable(name, &why)),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        Path::new(&self.folder).join(format!("{name}.img"))
    }
}

fn item(name: &str) -> Item {
    Item::Volume(name.to_owned())
}

/// Why a VM does not get a volume.
fn refused(name: &str, other: &Held) -> Error {
    let vm = match &other.holder {
        Holder::Vm(vm) => vm,
        Holder::Operation(operation) => return being_changed(name, operation),
    };
    let how = match other.mode {
        Mode::Shared => "read",
        Mode::Exclusive => "written",
    };
    Error::conflict(format!("The volume {name} is being {how} by the VM {vm}."))
        .hint("Stop that VM, or attach the volume read-only to both.")
}

fn unusable(name: &str, why: &str) -> Error {
    Error::internal(format!("The volume {name} can't be used: {why}."))
        .hint(format!("Remove it with `jiffy volume rm {name}`."))
}

fn being_changed(name: &str, operation: &str) -> Error {
    Error::conflict(format!("The volume {name} is being {operation}."))
        .hint("Try again when that is done.")
}

fn check_size(mib: u64) -> Result<()> {
    if mib == 0 || mib > MAX_MIB {
        return Err(Error::invalid(format!(
            "A volume can't have {mib} MiB; it can have 1 to {MAX_MIB} MiB."
        )));
    }
    Ok(())
}

/// The file of a new volume. A raw volume, or one too small for a file system, is left empty.
fn contents(path: &Path, name: &str, bytes: u64, raw: bool) -> io::Result<File> {
    if !raw && Layout::of(bytes, true).is_some() {
        return roots::empty(path, bytes, name, true);
    }
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    file.set_len(bytes)?;
    Ok(file)
}

/// Whether there is any data, not only holes, from this byte on (lseek(2), SEEK_DATA).
fn has_data(file: &File, from: u64) -> io::Result<bool> {
    match rustix::fs::seek(file, SeekFrom::Data(from)) {
        Ok(_) => Ok(true),
        Err(rustix::io::Errno::NXIO) => Ok(false),
        Err(error) => Err(error.into()),
    }
}
