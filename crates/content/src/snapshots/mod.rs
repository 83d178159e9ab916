//! Captured VMs on disk.
//!
//! A captured VM is a folder:
//!
//! | file | what |
//! |---|---|
//! | `snapshot.json` | the [manifest](crate::model::snapshot): what it is and what it needs |
//! | `state` | vCPUs, chips and devices, as the VMM wrote them |
//! | `ram.image` | RAM as an image of the store, which the pager serves |
//! | `ram.ID.image` | ancestors of that image: hard links to other snapshots' files |
//! | `ram.raw` | alternatively: RAM as a sparse file, which VMs map |
//! | `root.erofs` | a hard link to the image's file: the image can be removed |
//! | `volumes/NAME.img` | a clone of each volume |
//! | `prefault.json` | of a golden snapshot: ranges that a guest writes to soon after a restore |
//! | `accessed.json` | of a golden snapshot: ranges that a guest reads soon after a restore |
//! | `origins.json` | of a pulled snapshot: where missing chunks of its RAM come from |
//! | `recording` | which chunks the first restore touched |
//!
//! Blocks of RAM that are in `root.erofs` are not stored in `ram.image`, which refers to them.
//!
//! A snapshot is made in a folder whose name begins with a dot, synced, and renamed: after a
//! crash it is complete or absent, and the next daemon removes folders that begin with a dot.
//!
//! * [`captured`]: the files of a capture, as the VMM sends them.
//! * [`draft`]: a capture that is being written.
//! * [`saved`]: a capture on disk.
//! * [`memory`]: its RAM.
//! * [`root_tables`]: finds blocks of RAM in the root file system.
//! * [`inspect`]: reports of what its RAM consists of.
//! * [`remote`]: snapshots in registries.
//! * [`disks`]: the VM's own root disk and its volumes in registries.

pub mod captured;
pub mod disks;
pub mod draft;
pub mod inspect;
pub mod memory;
pub mod remote;
pub mod root_tables;
pub mod saved;

use crate::durable::{is_taken, set_aside};
use crate::error::{Error, Result};
use crate::images::name as image_name;
use crate::leases::{Held, Holder, Item, Lease, Leases, Mode};
use crate::model::snapshot::Manifest;
use crate::names;
use jiffy_sys::causes;
use jiffy_sys::priority::{BACKGROUND, lowered};
use root_tables::RootTables;
use saved::Saved;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::runtime::Handle;

/// The snapshots of a node's users.
#[derive(Debug)]
pub struct Snapshots {
    folder: PathBuf,
    root_tables: Arc<RootTables>,
    leases: Arc<Leases>,
}

/// A snapshot's name, and the snapshot or why it can't be read.
pub type Entry = (String, std::result::Result<Saved, String>);

impl Snapshots {
    /// The snapshots in this folder.
    pub fn new(folder: PathBuf, leases: Arc<Leases>) -> Snapshots {
        Snapshots {
            folder,
            root_tables: Arc::default(),
            leases,
        }
    }

    /// The block tables of root file systems, for snapshots that are being made.
    pub fn root_tables(&self) -> Arc<RootTables> {
        Arc::clone(&self.root_tables)
    }

    /// The folder of all snapshots.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The folder of a snapshot of this name, a plain name or a reference.
    pub fn path(&self, name: &str) -> PathBuf {
        // An invalid name maps to a folder that never exists.
        let folder = image_name::folder(name).unwrap_or_else(|_| ".none".to_owned());
        self.folder.join(folder)
    }

    /// Checks a name for a new snapshot.
    ///
    /// # Errors
    ///
    /// If the name is not valid or is taken.
    pub fn check_free(&self, name: &str) -> Result<()> {
        names::check("snapshot", name)?;
        if self.has(name) {
            return Err(taken(name));
        }
        Ok(())
    }

    /// Whether there is a snapshot of this name, damaged or not.
    pub fn has(&self, name: &str) -> bool {
        is_taken(&self.path(name))
    }

    /// A snapshot by name, its manifest read.
    ///
    /// # Errors
    ///
    /// If the name is not valid, there is no such snapshot, or its manifest can't be read.
    pub fn find(&self, name: &str) -> Result<Saved> {
        check(name)?;
        let folder = self.path(name);
        if !is_taken(&folder) {
            return Err(missing(name));
        }
        let manifest = Manifest::load(&folder).map_err(|error| {
            let problem = saved::unusable(name, &causes::sentence(&error));
            Error::internal(problem).hint(match error.is_newer() {
                true => "A newer release of Jiffy made it: use that release.".to_owned(),
                false => remedy(name),
            })
        })?;
        Ok(Saved::new(folder, manifest))
    }

    /// As [`Snapshots::find`], for a snapshot that has all its files.
    ///
    /// # Errors
    ///
    /// As for [`Snapshots::find`], or if a file is missing, empty or of another version.
    pub fn usable(&self, name: &str) -> Result<Saved> {
        let saved = self.find(name)?;
        match saved.problem(name) {
            None => Ok(saved),
            Some(problem) => Err(Error::internal(problem).hint(remedy(name))),
        }
    }

    /// All of them that can be read, by name.
    ///
    /// # Errors
    ///
    /// If the folder can't be read.
    pub fn list(&self) -> Result<Vec<(String, Saved)>> {
        let all = self.all()?.into_iter();
        Ok(all
            .filter_map(|(name, saved)| Some((name, saved.ok()?)))
            .collect())
    }

    /// All of them by name, or why one can't be read: a sentence without its full stop.
    ///
    /// # Errors
    ///
    /// If the folder can't be read.
    pub fn all(&self) -> Result<Vec<Entry>> {
        let entries = fs::read_dir(&self.folder)
            .map_err(|error| Error::io("list snapshots", &self.folder, &error))?;
        let mut found: Vec<Entry> = entries
            .flatten()
            .filter_map(|entry| {
                let name = image_name::of_folder(&entry.file_name().to_string_lossy())?;
                Some((name, Saved::open(entry.path())))
            })
            .collect();
        found.sort_by(|one, other| one.0.cmp(&other.0));
        Ok(found)
    }

    /// The folder of the last snapshot that was made of the VM with this name since it was started
    /// (Unix time, seconds).
    ///
    /// # Errors
    ///
    /// If the folder of snapshots can't be read.
    pub fn latest_of(&self, vm: &str, started: u64) -> Result<Option<PathBuf>> {
        let all = self.list()?.into_iter().map(|(_, saved)| saved);
        let of_it =
            all.filter(|saved| saved.manifest.vm == vm && saved.manifest.created >= started);
        let last = of_it.max_by_key(|saved| {
            let written = fs::metadata(saved.memory()).and_then(|file| file.modified());
            (saved.manifest.created, written.ok())
        });
        Ok(last.map(|saved| saved.folder))
    }

    /// A lease for a rewrite by the caller: until it is dropped, nobody else can remove, replace or
    /// rewrite the snapshot.
    ///
    /// # Errors
    ///
    /// If another lease excludes it: the snapshot is in use.
    pub fn lease_for_rewrite(&self, name: &str) -> Result<Lease> {
        self.exclusive(name, "optimised")
    }

    /// A lease for a push by the caller: until it is dropped, nobody can remove, replace or rewrite
    /// the snapshot, so that all files that are sent are of one capture.
    ///
    /// # Errors
    ///
    /// If another lease excludes it: the snapshot is being changed or removed.
    pub fn lease_for_push(&self, name: &str) -> Result<Lease> {
        self.lease(name, Mode::Shared, "pushed")
    }

    fn exclusive(&self, name: &str, operation: &'static str) -> Result<Lease> {
        self.lease(name, Mode::Exclusive, operation)
    }

    fn lease(&self, name: &str, mode: Mode, operation: &'static str) -> Result<Lease> {
        let item = Item::Snapshot(self.path(name));
        let holder = Holder::Operation(operation);
        let lease = self.leases.take(item, mode, holder);
        lease.map_err(|other| in_use(name, &other))
    }

    /// Removes a snapshot: blocking. It is there whole or not at all.
    ///
    /// # Errors
    ///
    /// If the name is not valid, there is no such snapshot, it is in use, or its folder can't be
    /// removed.
    pub fn remove(&self, name: &str) -> Result<()> {
        check(name)?;
        let path = self.path(name);
        if !is_taken(&path) {
            return Err(missing(name));
        }
        let _lease = self.exclusive(name, "removed")?;
        remove_atomically(&path).map_err(|error| Error::io("remove a snapshot", &path, &error))
    }
}

/// Removes a folder so that it is never seen half removed, unless the disk has no room to move it away.
///
/// # Errors
///
/// If the folder can't be moved away, or its parent synced, or its contents removed.
pub fn remove_atomically(path: &Path) -> std::io::Result<()> {
    let gone = set_aside(path)?;
    jiffy_sys::durable::sync_folder_of(path)?;
    gone.close()
}

/// Moves a folder away at once, and removes its contents, which may be large, in the background.
/// After a power cut the folder may be there again.
///
/// # Errors
///
/// If the folder can't be moved away.
pub fn remove_in_background(path: &Path) -> std::io::Result<()> {
    let gone = set_aside(path)?;
    match Handle::try_current() {
        Ok(runtime) => drop(runtime.spawn_blocking(|| lowered(BACKGROUND, || gone.close()))),
        Err(_) => gone.close()?,
    }
    Ok(())
}

/// A name of the user's own, or the reference that it was pulled by.
fn check(name: &str) -> Result<()> {
    match image_name::is_plain(name) {
        true => names::check("snapshot", name),
        false => image_name::folder(name).map(|_| ()),
    }
}

/// What helps with a snapshot that can't be used.
fn remedy(name: &str) -> String {
    let remove = format!("Remove it with `jiffy snapshot rm {name}`");
    match image_name::is_plain(name) {
        true => format!("{remove}."),
        false => format!("{remove}, or replace it with `jiffy pull {name}`."),
    }
}

fn missing(name: &str) -> Error {
    let shown: String = name.chars().take(64).collect();
    Error::not_found(format!("There is no snapshot {shown}."))
        .hint("`jiffy snapshot ls` lists them; `jiffy snapshot create` makes one.")
}

fn taken(name: &str) -> Error {
    Error::conflict(format!("There is a snapshot {name} already.")).hint(format!(
        "Choose another name, or remove it with `jiffy snapshot rm {name}`."
    ))
}

fn in_use(name: &str, other: &Held) -> Error {
    let how = match &other.holder {
        Holder::Operation(operation) => format!("is being {operation}"),
        Holder::Vm(vm) => format!("is in use by the VM {vm}"),
    };
    Error::conflict(format!("The snapshot {name} {how}.")).hint("Try again when that is done.")
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_wire::api::ErrorKind;

    #[test]
    fn errors_about_a_pulled_snapshot_give_its_reference() {
        let folder = tempfile::tempdir().unwrap();
        let snapshots = Snapshots::new(folder.path().to_owned(), Arc::default());
        for (name, remedy) in [
            ("warm", "Remove it with `jiffy snapshot rm warm`."),
            (
                "registry.example/team/warm:1",
                "Remove it with `jiffy snapshot rm registry.example/team/warm:1`, or replace it with `jiffy pull registry.example/team/warm:1`.",
            ),
        ] {
            let path = snapshots.path(name);
            fs::create_dir(&path).unwrap();
            fs::write(path.join("snapshot.json"), "damaged").unwrap();
            let error = snapshots.find(name).unwrap_err();
            let begins = format!("The snapshot {name} can't be used: the file is damaged");
            assert!(error.0.message.starts_with(&begins), "{error}");
            assert_eq!(error.0.hint.as_deref(), Some(remedy));
            let manifest = include_str!("../../golden/snapshot-1.json");
            fs::write(path.join("snapshot.json"), manifest).unwrap();
            let error = snapshots.usable(name).unwrap_err();
            assert!(error.0.message.contains("state is missing"), "{error}");
            assert_eq!(error.0.hint.as_deref(), Some(remedy));

            let manifest = snapshots.find(name).unwrap().manifest;
            let draft = draft::Draft::new(folder.path(), &Arc::default()).unwrap();
            let error = draft.name(&path, &manifest, false).unwrap_err();
            let taken = format!("There is a snapshot {name} already.");
            assert_eq!(error.0.message, taken);
        }
    }

    #[test]
    fn a_snapshot_being_rewritten_or_pushed_is_not_removed() {
        let folder = tempfile::tempdir().unwrap();
        let snapshots = Snapshots::new(folder.path().to_owned(), Arc::default());
        fs::create_dir(snapshots.path("one")).unwrap();
        let rewriting = snapshots.lease_for_rewrite("one").unwrap();
        let refused = [
            snapshots.remove("one").unwrap_err(),
            snapshots.lease_for_rewrite("one").unwrap_err(),
        ];
        for error in refused {
            assert_eq!(error.0.kind, ErrorKind::Conflict);
        }
        assert!(snapshots.path("one").exists());
        snapshots.lease_for_push("one").unwrap_err();
        drop(rewriting);
        let pushes = ["one", "one"].map(|name| snapshots.lease_for_push(name).unwrap());
        for error in [
            snapshots.remove("one").unwrap_err(),
            snapshots.lease_for_rewrite("one").unwrap_err(),
        ] {
            assert!(error.0.message.contains("is being pushed"), "{error}");
        }
        drop(pushes);
        snapshots.remove("one").unwrap();
        assert!(!snapshots.path("one").exists());
    }
}
