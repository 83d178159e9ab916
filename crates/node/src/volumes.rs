//! Volumes: raw, sparse disk files that outlive VMs.

use crate::error::{Error, Result};
use crate::names;
use jiffy_wire::api::{Volume, VolumeUse};
use rustix::fs::{AtFlags, CWD, RenameFlags};
use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Largest volume: 64 TiB, in MiB.
const MAX_MIB: u64 = 64 << 20;
/// Most volumes of one VM: `/dev/vdb` to `/dev/vdy`.
pub const MAX_PER_VM: usize = 24;

/// The volumes of a node.
#[derive(Debug)]
pub struct Volumes {
    folder: PathBuf,
    uses: Mutex<HashMap<String, Vec<Use>>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Use {
    vm: String,
    read_only: bool,
}

/// A volume held by a running VM; dropping it lets go.
#[derive(Debug)]
pub struct Lease {
    /// The volume's name.
    pub name: String,
    /// Its file.
    pub path: PathBuf,
    /// Refuse writes?
    pub read_only: bool,
    vm: String,
    volumes: Arc<Volumes>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut uses = self.volumes.lock();
        if let Some(users) = uses.get_mut(&self.name) {
            users.retain(|user| user.vm != self.vm);
            if users.is_empty() {
                uses.remove(&self.name);
            }
        }
    }
}

impl Volumes {
    /// The volumes in this folder.
    pub fn new(folder: PathBuf) -> Volumes {
        Volumes {
            folder,
            uses: Mutex::default(),
        }
    }

    /// Makes the volumes a new VM asks for that don't exist; gives the names
    /// of those made. After an error none is left.
    pub fn provide(&self, wanted: &[VolumeUse]) -> Result<Vec<String>> {
        let mut made = Vec::new();
        for volume in wanted {
            match self.provide_one(volume) {
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

    /// Removes volumes that [`Volumes::provide`] made in vain.
    pub fn discard(&self, made: &[String]) {
        for name in made {
            let _ = fs::remove_file(self.path(name));
        }
    }

    fn provide_one(&self, wanted: &VolumeUse) -> Result<bool> {
        let name = &wanted.name;
        names::check("volume", name)?;
        if let Some(size) = self.size(name)? {
            return match wanted.size_mib {
                Some(mib) if mib << 20 != size => Err(Error::conflict(format!(
                    "The volume {name} has {} MiB, not {mib} MiB.",
                    size >> 20
                ))
                .hint("Leave the size out to use the volume as it is.")),
                _ => Ok(false),
            };
        }
        let Some(mib) = wanted.size_mib else {
            return Err(
                Error::not_found(format!("There is no volume {name}.")).hint(format!(
                    "Give a size in MiB to make it, as in `--disk {name}:1024`."
                )),
            );
        };
        if mib == 0 || mib > MAX_MIB {
            return Err(Error::invalid(format!(
                "A volume of {mib} MiB can't be made; it must have 1 to {MAX_MIB} MiB."
            )));
        }
        self.make(name, mib << 20)
            .map_err(|error| Error::io("make a volume", &self.path(name), &error))
    }

    /// False if somebody else made it meanwhile.
    fn make(&self, name: &str, bytes: u64) -> io::Result<bool> {
        let path = self.path(name);
        let temporary = self.folder.join(format!(".{name}.{}.tmp", names::suffix()));
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&temporary)?;
        let made = file
            .set_len(bytes)
            .and_then(|()| file.sync_all())
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
        jiffy_sys::durable::sync_folder_of(&path)?;
        made
    }

    /// Holds the volumes for a VM that starts. One VM that writes excludes
    /// all others; any number may read.
    pub fn hold(self: &Arc<Volumes>, wanted: &[VolumeUse], vm: &str) -> Result<Vec<Lease>> {
        let mut leases = Vec::with_capacity(wanted.len());
        for volume in wanted {
            let name = &volume.name;
            if self.size(name)?.is_none() {
                return Err(Error::not_found(format!("The volume {name} is gone.")));
            }
            let mut uses = self.lock();
            let users = uses.entry(name.clone()).or_default();
            if let Some(other) = users
                .iter()
                .find(|other| !(other.read_only && volume.read_only))
            {
                let how = if other.read_only { "read" } else { "written" };
                return Err(Error::conflict(format!(
                    "The volume {name} is being {how} by the VM {}.",
                    other.vm
                ))
                .hint("Stop that VM, or attach the volume read-only to both."));
            }
            users.push(Use {
                vm: vm.to_owned(),
                read_only: volume.read_only,
            });
            drop(uses);
            leases.push(Lease {
                name: name.clone(),
                path: self.path(name),
                read_only: volume.read_only,
                vm: vm.to_owned(),
                volumes: Arc::clone(self),
            });
        }
        Ok(leases)
    }

    /// Where a volume is.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path(name)
    }

    /// The names of the VMs that hold any of these volumes.
    pub fn users(&self, wanted: &[VolumeUse]) -> Vec<String> {
        let uses = self.lock();
        wanted
            .iter()
            .filter_map(|volume| uses.get(&volume.name))
            .flatten()
            .map(|user| user.vm.clone())
            .collect()
    }

    /// All volumes, by name.
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
            let Ok(Some(size)) = self.size(name) else {
                continue;
            };
            let used_by = self
                .lock()
                .get(name)
                .map(|users| users.iter().map(|user| user.vm.clone()).collect())
                .unwrap_or_default();
            volumes.push(Volume {
                name: name.to_owned(),
                size_mib: size >> 20,
                used_by,
            });
        }
        volumes.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(volumes)
    }

    /// Removes a volume that no VM has.
    pub fn remove(&self, name: &str) -> Result<()> {
        names::check("volume", name)?;
        let path = self.path(name);
        match rustix::fs::unlinkat(CWD, &path, AtFlags::empty()) {
            Ok(()) => Ok(()),
            Err(rustix::io::Errno::NOENT) => {
                Err(Error::not_found(format!("There is no volume {name}.")))
            }
            Err(error) => Err(Error::io("remove a volume", &path, &error.into())),
        }
    }

    fn size(&self, name: &str) -> Result<Option<u64>> {
        let path = self.path(name);
        match File::open(&path).and_then(|file| file.metadata()) {
            Ok(metadata) => Ok(Some(metadata.len())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Error::io("look at a volume", &path, &error)),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        Path::new(&self.folder).join(format!("{name}.img"))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Vec<Use>>> {
        self.uses.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_wire::api::ErrorKind;

    fn volume(name: &str, size_mib: Option<u64>, read_only: bool) -> VolumeUse {
        VolumeUse {
            name: name.into(),
            size_mib,
            read_only,
            ..VolumeUse::default()
        }
    }

    #[test]
    fn one_writer_or_many_readers() {
        let folder = tempfile::tempdir().unwrap();
        let volumes = Arc::new(Volumes::new(folder.path().into()));
        volumes.provide(&[volume("data", Some(2), false)]).unwrap();
        let read = [volume("data", None, true)];
        let write = [volume("data", None, false)];
        let one = volumes.hold(&read, "one").unwrap();
        let two = volumes.hold(&read, "two").unwrap();
        assert_eq!(volumes.list().unwrap()[0].used_by, ["one", "two"]);
        let refused = volumes.hold(&write, "three").unwrap_err();
        assert_eq!(refused.0.kind, ErrorKind::Conflict);
        drop((one, two));
        let writer = volumes.hold(&write, "three").unwrap();
        assert!(volumes.hold(&read, "one").is_err());
        drop(writer);
        assert!(volumes.list().unwrap()[0].used_by.is_empty());
    }

    #[test]
    fn a_failed_request_leaves_no_volume() {
        let folder = tempfile::tempdir().unwrap();
        let volumes = Volumes::new(folder.path().into());
        for bad in [
            volume("absent", None, false),
            volume("none", Some(0), false),
            volume("../up", Some(1), false),
            volume("huge", Some(u64::MAX), false),
        ] {
            let error = volumes
                .provide(&[volume("first", Some(1), false), bad])
                .unwrap_err();
            assert!(error.0.message.len() > 10);
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        }
    }

    #[test]
    fn an_existing_volume_keeps_its_size() {
        let folder = tempfile::tempdir().unwrap();
        let volumes = Volumes::new(folder.path().into());
        let make = |size| volumes.provide(&[volume("data", size, false)]);
        assert_eq!(make(Some(2)).unwrap(), ["data"]);
        assert!(make(Some(2)).unwrap().is_empty());
        assert!(make(None).unwrap().is_empty());
        assert_eq!(make(Some(3)).unwrap_err().0.kind, ErrorKind::Conflict);
    }
}
