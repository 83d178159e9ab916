//! A capture that is being written to disk.

use super::captured::Captured;
use super::memory::DedupSources;
use super::root_tables::RootTables;
use super::saved::{ROOT, Saved};
use super::{memory, taken};
use crate::error::{Error, Result};
use crate::images::name::of_folder;
use crate::model::snapshot::Manifest;
use crate::model::vm::Root;
use crate::paths::{make_volumes, volume_in};
use crate::room::disk::Room;
use jiffy_sys::priority::{AWAITED, lowered};
use rustix::fs::{CWD, RenameFlags};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;

/// A temporary folder for a capture, removed when this is dropped.
#[derive(Debug)]
pub struct Draft {
    folder: TempDir,
    room: Arc<Room>,
    base: Option<PathBuf>,
    root_tables: Option<Arc<RootTables>>,
    /// Added to the nice value of the threads that write.
    nice: i32,
    /// RAM is written as it is if it has at most so many bytes of data.
    raw_up_to: Option<u64>,
}

/// A capture as it was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Written {
    /// RAM.
    pub memory: memory::Written,
    /// Bytes of other captures' images of RAM that this one's is built on.
    pub shared: u64,
    /// Bytes of its other files.
    pub other: u64,
}

impl Draft {
    /// An empty draft in the folder of `beside`, on a disk with this room.
    ///
    /// # Errors
    ///
    /// If the folder can't be made.
    pub fn new(beside: &Path, room: &Arc<Room>) -> Result<Draft> {
        let folder = tempfile::Builder::new()
            .prefix(".new-")
            .tempdir_in(beside)
            .map_err(|error| Error::io("make a snapshot", beside, &error))?;
        Ok(Draft {
            folder,
            room: Arc::clone(room),
            base: None,
            root_tables: None,
            nice: AWAITED,
            raw_up_to: None,
        })
    }

    /// RAM is written as a child of the capture in this folder: only the differences.
    pub fn built_on(&mut self, base: PathBuf) {
        self.base = Some(base);
    }

    /// Blocks of RAM that are also in the root file system are not written.
    pub fn share_with_root(&mut self, tables: Arc<RootTables>) {
        self.root_tables = Some(tables);
    }

    /// Sets what is added to the nice value of the threads that write.
    pub fn set_nice(&mut self, nice: i32) {
        self.nice = nice;
    }

    /// RAM with at most so many bytes of data is written as it is; without this call, all of it is
    /// compressed.
    pub fn keep_raw(&mut self, up_to: u64) {
        self.raw_up_to = Some(up_to);
    }

    /// The temporary folder.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Clones these volumes, by name: blocking. They must not be written to meanwhile.
    ///
    /// # Errors
    ///
    /// If a volume can't be opened, the file system can't clone files, or the clone can't be made.
    pub fn clone_volumes<'a>(
        &self,
        volumes: impl Iterator<Item = (&'a str, &'a Path)>,
    ) -> Result<()> {
        clone_volumes(self.path(), volumes)
    }

    /// Hard-links the image's file, if it is to be kept, and writes state and RAM: blocking.
    ///
    /// # Errors
    ///
    /// If the VMM's state or RAM can't be read, there is no room, or a file can't be written or
    /// linked.
    pub fn write(&self, captured: &Captured, root: Option<&Root>) -> Result<Written> {
        lowered(self.nice, || self.write_now(captured, root))
    }

    fn write_now(&self, captured: &Captured, root: Option<&Root>) -> Result<Written> {
        let folder = self.path();
        let path = folder.join("state");
        let failed = |error: io::Error| Error::io("write a VM's state", &path, &error);
        let state = captured.state().map_err(|error| {
            Error::vm_failed(format!("The state of the VM can't be read: {error}."))
        })?;
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)
            .map_err(failed)?;
        file.write_all(&state)
            .and_then(|()| file.sync_all())
            .map_err(failed)?;
        let dedup_sources = self.dedup_sources(root)?;
        let memory = memory::write(folder, self.raw_up_to, captured, dedup_sources, &self.room)?;
        let shared = memory::bases_in(folder)
            .iter()
            .map(|path| memory::bytes_of(path).unwrap_or(0))
            .sum();
        let mut other = state.len() as u64;
        for entry in fs::read_dir(folder.join("volumes")).into_iter().flatten() {
            let path = entry
                .map_err(|error| Error::io("look at volumes", folder, &error))?
                .path();
            // The clone shares its blocks at first; this is the most it can come to take.
            other += memory::bytes_of(&path).unwrap_or(0);
        }
        Ok(Written {
            memory,
            shared,
            other,
        })
    }

    /// Keeps the root file system, which RAM may refer to.
    fn dedup_sources<'a>(&'a self, root: Option<&'a Root>) -> Result<DedupSources<'a>> {
        let link = self.path().join(ROOT);
        if let Some(root) = root {
            // The contents of a lazy root may be in the page cache only.
            let synced = match root.lazy {
                Some(_) => File::open(&root.path).and_then(|file| file.sync_data()),
                None => Ok(()),
            };
            synced
                .and_then(|()| fs::hard_link(&root.path, &link))
                .map_err(|error| Error::io("link the image", &link, &error))?;
        }
        let tables = self.root_tables.as_ref().zip(root);
        Ok(DedupSources {
            base: self.base.as_deref(),
            root: root.map_or("", |root| &root.digest),
            backing: tables.and_then(|(tables, root)| tables.backing(&link, root)),
        })
    }

    /// Writes the manifest, syncs everything and renames the folder to `to`: blocking. `to` must
    /// be free unless `replace`.
    ///
    /// # Errors
    ///
    /// If there is a capture of that name and `replace` is false, or the manifest can't be written
    /// or the folder renamed.
    pub fn name(self, to: &Path, manifest: &Manifest, replace: bool) -> Result<Saved> {
        let failed = |error: io::Error| Error::io("name a snapshot", to, &error);
        manifest.save(self.path()).map_err(failed)?;
        sync_folder(self.path()).map_err(failed)?;
        let exchange = replace && to.exists();
        let flags = match exchange {
            true => RenameFlags::EXCHANGE,
            false => RenameFlags::NOREPLACE,
        };
        match rustix::fs::renameat_with(CWD, self.path(), CWD, to, flags) {
            // The replaced folder is removed with the temporary one.
            Ok(()) if exchange => {}
            Ok(()) => {
                let _ = self.folder.keep();
            }
            Err(rustix::io::Errno::EXIST | rustix::io::Errno::NOTEMPTY) => {
                let folder = to.file_name().unwrap_or_default().to_string_lossy();
                return Err(taken(
                    &of_folder(&folder).unwrap_or_else(|| folder.into_owned()),
                ));
            }
            Err(error) => return Err(failed(error.into())),
        }
        jiffy_sys::durable::sync_folder_of(to).map_err(failed)?;
        Ok(Saved::new(to.to_owned(), manifest.clone()))
    }
}

fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Clones volumes into the folder `volumes` in `folder`: blocking.
///
/// # Errors
///
/// As for [`Draft::clone_volumes`].
pub fn clone_volumes<'a>(
    folder: &Path,
    volumes: impl Iterator<Item = (&'a str, &'a Path)>,
) -> Result<()> {
    for (name, from) in volumes {
        let to = volume_in(folder, name);
        make_volumes(folder).map_err(|error| Error::io("clone a volume", &to, &error))?;
        clone_volume(name, from, &to)?;
    }
    Ok(())
}

/// Clones a file: both share their blocks until one of them changes (ioctl_ficlone(2)).
fn clone_volume(name: &str, from: &Path, to: &PathBuf) -> Result<()> {
    let failed = |error: io::Error| Error::io("clone a volume", to, &error);
    let source = jiffy_sys::regular::open(from).map_err(failed)?;
    let target = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(to)
        .map_err(failed)?;
    match rustix::fs::ioctl_ficlone(&target, &source) {
        Ok(()) => target.sync_all().map_err(failed),
        Err(rustix::io::Errno::NOSPC) => Err(failed(rustix::io::Errno::NOSPC.into())),
        Err(error) => {
            let _ = fs::remove_file(to);
            let what = match name {
                crate::roots::NAME => "root disk of the VM".to_owned(),
                _ => format!("volume {name}"),
            };
            Err(Error::wrong_state(format!(
                "The {what} can't be captured: the file system that holds {} can't clone files ({error}).",
                from.display()
            ))
            .hint("Keep Jiffy's data on XFS or Btrfs, or use a VM without disks of its own."))
        }
    }
}
