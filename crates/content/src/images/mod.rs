//! Images of root file systems.
//!
//! An image is a folder `images/NAME/` ([`name::folder`] encodes references):
//!
//! | file | what |
//! |---|---|
//! | `image.json` | the [`record`] |
//! | `image.erofs` | the file system, as VMs read it |
//! | `boot.json` | the boot set: what a guest has read during a boot, once one was recorded |
//!
//! An image that was pushed, or was pulled as an artifact of Jiffy, also has an image of
//! [`chunks`]. A partial image has no `image.erofs`: VMs read it as a [`lazy`] disk.
//!
//! An image is made in a folder whose name begins with a dot, synced, and renamed: after a crash
//! it is complete or absent, and the next daemon removes folders that begin with a dot.
//!
//! * [`name`]: names, references and folders.
//! * [`record`]: what `image.json` holds.
//! * `writable`: ext4 images, kept as they are.
//! * [`config`]: how an image's configuration and a request become a command.
//! * [`base`]: the image that comes with Jiffy.
//! * [`import`]: tars and archives of other tools.
//! * [`process`]: the process that makes an image.
//! * [`policy`]: which signatures images from registries need.
//! * `cut`: images cut into chunks.
//! * [`artifact`]: the configuration of an image in a registry.
//! * [`chunks`]: images of chunks.
//! * [`boot`]: boot sets of images.
//! * `unused`: images, chunks and caches that nothing uses.
//! * [`lazy`]: disks whose contents are fetched when a guest reads them.

pub mod artifact;
pub mod base;
pub mod boot;
pub mod chunks;
pub mod config;
mod cut;
pub mod import;
pub mod lazy;
pub mod name;
pub mod policy;
pub mod process;
pub mod record;
#[cfg(test)]
mod tests;
mod unused;
mod writable;

use crate::durable::{self, LoadError, is_taken, set_aside};
use crate::error::{Error, Result};
use crate::leases::{Lease, Leases};
use crate::model::image::{ImageRecord, LazyDisk};
use crate::model::vm::Root;
use crate::paths::Paths;
use crate::room::disk::Room;
use base::BASE;
use chunks::Chunks;
pub use import::Made;
use jiffy_sys::causes;
use jiffy_sys::durable::remove_any;
use jiffy_sys::mutex::lock;
use jiffy_wire::api::{Image, ImageConfig};
use jiffy_wire::disk::CONTENTS;
use policy::Policy;
use process::Importer;
use rustix::fs::{CWD, RenameFlags};
use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tempfile::TempDir;
use tokio::sync::Mutex;

/// The file system in an image's folder.
pub(crate) const ROOT: &str = "image.erofs";

/// The images of a node.
#[derive(Debug)]
pub struct Images {
    pub(crate) folder: PathBuf,
    share: PathBuf,
    /// Registry of names without one, unless a request names another.
    registry: Option<String>,
    /// The keys that must have signed images from registries.
    policy: Policy,
    /// The images of chunks.
    pub(crate) chunks: Chunks,
    /// Folder of the disk caches.
    disks: PathBuf,
    /// Folder of snapshots: those from registries use chunks, too.
    pub(crate) snapshots: PathBuf,
    /// Folder of VMs: running VMs use chunks even if their image was removed.
    vms: PathBuf,
    /// Makes images.
    pub(crate) importer: Importer,
    /// Disk room of what is being written.
    pub(crate) room: Arc<Room>,
    /// Serialises changes of images.
    changing: Arc<Mutex<()>>,
    /// The built-in image exists and is this release's.
    base_ready: AtomicBool,
    /// Records by folder, with the inode number of the file each was read from.
    records: std::sync::Mutex<HashMap<PathBuf, (u64, Arc<ImageRecord>)>>,
}

/// An image that exists.
#[derive(Debug, Clone)]
pub struct Found {
    /// Its full name.
    pub name: String,
    /// Its file system.
    pub root: Root,
    /// Its record.
    pub record: Arc<ImageRecord>,
}

impl Found {
    /// How its commands are started.
    pub fn config(&self) -> &ImageConfig {
        &self.record.config
    }
}

impl Images {
    /// The images in these folders.
    pub fn new(
        paths: &Paths,
        registry: Option<String>,
        policy: Policy,
        room: Arc<Room>,
        leases: Arc<Leases>,
    ) -> Images {
        Images {
            folder: paths.images(),
            share: paths.share.join("images"),
            registry: registry.filter(|registry| !registry.is_empty()),
            policy,
            chunks: Chunks::with_leases(paths.chunks(), leases),
            disks: paths.disks(),
            snapshots: paths.snapshots(),
            vms: paths.vms(),
            importer: Importer::new(paths.import()),
            room,
            changing: Arc::default(),
            base_ready: AtomicBool::new(false),
            records: std::sync::Mutex::default(),
        }
    }

    /// The registry of names without one.
    pub fn registry<'a>(&'a self, wanted: Option<&'a str>) -> Option<&'a str> {
        let wanted = wanted.filter(|wanted| !wanted.is_empty());
        wanted.or(self.registry.as_deref())
    }

    /// The image that a user means.
    ///
    /// # Errors
    ///
    /// If the text is neither a name nor a reference, there is no such image, or it can't be used.
    pub async fn resolve(&self, text: &str, registry: Option<&str>) -> Result<Found> {
        let candidates = name::candidates(text, self.registry(registry))?;
        for candidate in &candidates {
            if let Some(found) = self.look_up(candidate).await? {
                return Ok(found);
            }
        }
        Err(missing(text))
    }

    /// Finds an image by its full name; makes the built-in image if needed.
    ///
    /// # Errors
    ///
    /// If there is no such image, its record can't be read, or its file or chunks are missing.
    pub async fn find(&self, name: &str) -> Result<Found> {
        if name::folder(name).is_err() {
            return Err(missing(name));
        }
        self.look_up(name).await?.ok_or_else(|| missing(name))
    }

    /// As [`Images::find`], for a VM that starts.
    ///
    /// # Errors
    ///
    /// As for [`Images::find`], or if the image lacks a required signature.
    pub async fn startable(&self, name: &str) -> Result<Found> {
        let found = self.find(name).await?;
        self.policy
            .check("image", name, found.record.source.as_ref())?;
        Ok(found)
    }

    /// The keys that must have signed images from registries.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Records which keys have signed an image; false if the image's manifest is another one by
    /// now: blocking.
    ///
    /// # Errors
    ///
    /// If the name is not valid, or the record can't be written.
    pub fn note_signed(&self, name: &str, manifest: &str, signed_by: &[String]) -> Result<bool> {
        let folder = self.folder_of(name)?;
        let _one = self.changing.blocking_lock();
        let Ok(mut record) = ImageRecord::load(&folder) else {
            return Ok(false);
        };
        let source = record.source.as_mut();
        let Some(source) = source.filter(|it| it.manifest.as_deref() == Some(manifest)) else {
            return Ok(false);
        };
        policy::add(&mut source.signed_by, signed_by);
        record
            .save(&folder)
            .map_err(|error| Error::io("write an image's record", &folder, &error))?;
        self.drop_cached(&folder);
        Ok(true)
    }

    /// Looks an image up. An image's file never changes; a new image is a new file.
    async fn look_up(&self, name: &str) -> Result<Option<Found>> {
        if name == BASE && !self.base_ready.load(Ordering::Acquire) {
            self.provide_base().await?;
        }
        let folder = self.folder_of(name)?;
        let path = folder.join(ROOT);
        let whole = durable::check_not_empty(&path);
        if whole.is_ok() {
            let record = self.record(name)?;
            let root = Root {
                path,
                digest: record.digest.clone(),
                lazy: None,
            };
            return Ok(Some(Found {
                name: name.to_owned(),
                root,
                record,
            }));
        }
        if name == BASE {
            self.base_ready.store(false, Ordering::Release);
        }
        if !is_taken(&folder) {
            return Ok(None);
        }
        let record = self.record(name)?;
        self.check(name, &record, &folder)?;
        let chunks = record.chunks.clone();
        let root = Root {
            path: lazy::cache_in(&self.disks, &chunks).join(CONTENTS),
            digest: record.digest.clone(),
            lazy: Some(LazyDisk {
                chunks,
                ext4: record.ext4,
            }),
        };
        Ok(Some(Found {
            name: name.to_owned(),
            root,
            record,
        }))
    }

    /// All images, by name.
    ///
    /// # Errors
    ///
    /// If the folder can't be read. An image that can't be used is listed with the reason.
    pub fn list(&self) -> Result<Vec<Image>> {
        let mut images = Vec::new();
        let entries = fs::read_dir(&self.folder)
            .map_err(|error| Error::io("list images", &self.folder, &error))?;
        for entry in entries.flatten() {
            let Some(name) = name::of_folder(&entry.file_name().to_string_lossy()) else {
                continue;
            };
            images.push(match ImageRecord::load(&entry.path()) {
                Ok(record) => self.image(&name, &record, &entry.path()),
                Err(error) => Image {
                    error: Some(unreadable(&name, &error).0.message),
                    name,
                    ..Image::default()
                },
            });
        }
        images.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(images)
    }

    /// An image as the API shows it.
    ///
    /// # Errors
    ///
    /// If the name is not valid.
    pub fn shown(&self, found: &Found) -> Result<Image> {
        let folder = self.folder_of(&found.name)?;
        Ok(self.image(&found.name, &found.record, &folder))
    }

    /// Removes an image.
    ///
    /// # Errors
    ///
    /// If there is no such image, `in_use` fails (a VM needs it), or its folder can't be renamed.
    pub async fn remove<F: Future<Output = Result<()>>>(
        self: &Arc<Self>,
        name: &str,
        in_use: impl Fn() -> F,
    ) -> Result<()> {
        let path = self.folder_of(name)?;
        let one = Arc::clone(&self.changing).lock_owned().await;
        if !is_taken(&path) {
            return Err(missing(name));
        }
        in_use().await?;
        self.drop_cached(&path);
        if name == BASE {
            self.base_ready.store(false, Ordering::Release);
        }
        let gone = set_aside(&path).map_err(|error| Error::io("remove an image", &path, &error))?;
        let images = Arc::clone(self);
        let removed = tokio::task::spawn_blocking(move || {
            images.collect_garbage();
            drop(one);
            // May free gigabytes, so it is done here, on a blocking thread.
            drop(gone);
        });
        removed.await.map_err(|error| cut_short(&error))
    }

    /// Holds the chunks that a root file system is filled from, for a VM whose record does not
    /// name them yet.
    pub fn hold(&self, root: &Root) -> Vec<Lease> {
        let disk = root.lazy.as_ref();
        disk.map_or_else(Vec::new, |disk| self.chunks.hold(&disk.chunks))
    }

    /// A temporary folder for an image that has no name yet.
    pub(crate) fn temporary(&self) -> Result<TempDir> {
        tempfile::Builder::new()
            .prefix(".new-")
            .tempdir_in(&self.folder)
            .map_err(|error| Error::io("make an image", &self.folder, &error))
    }

    /// Writes the record of an image that is being made.
    ///
    /// # Errors
    ///
    /// If the configuration is not valid, or the record can't be written.
    pub fn complete(&self, temporary: &TempDir, record: &ImageRecord) -> Result<()> {
        config::check(&record.config)?;
        record
            .save(temporary.path())
            .map_err(|error| Error::io("write an image's record", temporary.path(), &error))
    }

    /// Gives a finished image its name and removes the image that had it. The caller holds
    /// `changing`, so that there is one change at a time.
    fn put(&self, name: &str, temporary: TempDir) -> Result<()> {
        let to = self.folder_of(name)?;
        let failed = |error: io::Error| Error::io("name an image", &to, &error);
        self.drop_cached(&to);
        if is_taken(&to) {
            // The old one is removed with the temporary folder. VMs that
            // still read it keep it open.
            let flags = RenameFlags::EXCHANGE;
            rustix::fs::renameat_with(CWD, temporary.path(), CWD, &to, flags)
                .map_err(|error| failed(error.into()))?;
            // TempDir would fail to remove something that is not a folder.
            remove_any(temporary.path()).map_err(failed)?;
        } else {
            fs::rename(temporary.path(), &to).map_err(failed)?;
            let _ = temporary.keep();
        }
        jiffy_sys::durable::sync_folder_of(&to).map_err(failed)
    }

    /// Publishes a finished image under this name.
    ///
    /// # Errors
    ///
    /// If the name is not valid, `in_use` fails (a VM needs the old image), or a rename fails.
    pub async fn publish<F: Future<Output = Result<()>>>(
        self: &Arc<Self>,
        name: &str,
        temporary: TempDir,
        in_use: impl Fn() -> F,
    ) -> Result<()> {
        let one = Arc::clone(&self.changing).lock_owned().await;
        if is_taken(&self.folder_of(name)?) {
            in_use().await?;
        }
        let (images, name) = (Arc::clone(self), name.to_owned());
        // Blocking: the previous image may have gigabytes, and everything is synced.
        let put = tokio::task::spawn_blocking(move || {
            let _one = one;
            images.put(&name, temporary)
        });
        put.await.map_err(|error| cut_short(&error))?
    }

    /// The record of an image, cached until its file is written again.
    fn record(&self, name: &str) -> Result<Arc<ImageRecord>> {
        let folder = self.folder_of(name)?;
        let inode = fs::metadata(record::file(&folder)).map_or(0, |data| data.ino());
        let mut records = lock(&self.records);
        if let Some((_, record)) = records.get(&folder).filter(|(known, _)| *known == inode) {
            return Ok(Arc::clone(record));
        }
        let record = ImageRecord::load(&folder).map_err(|error| unreadable(name, &error))?;
        let record = Arc::new(record);
        records.insert(folder, (inode, Arc::clone(&record)));
        Ok(record)
    }

    /// Drops a cached record: its inode number may be reused from now on.
    fn drop_cached(&self, folder: &Path) {
        let mut records = lock(&self.records);
        records.remove(folder);
    }

    /// The full name of the image that a user means, even if its record can't be read.
    ///
    /// # Errors
    ///
    /// If the text is neither a name nor a reference, or there is no such image.
    pub fn full_name(&self, text: &str, registry: Option<&str>) -> Result<String> {
        let candidates = name::candidates(text, self.registry(registry))?;
        let is_here = |name: &String| self.folder_of(name).is_ok_and(|path| is_taken(&path));
        candidates
            .into_iter()
            .find(is_here)
            .ok_or_else(|| missing(text))
    }

    /// Refuses an image that has neither a file system nor chunks to fill one from.
    fn check(&self, name: &str, record: &ImageRecord, folder: &Path) -> Result<()> {
        let root = folder.join(ROOT);
        let path = match record.chunks.first() {
            Some(id) if !is_taken(&root) => self.chunks.path(id),
            _ => root,
        };
        durable::check_not_empty(&path).map_err(|why| unusable(name, &why))
    }

    /// As the API shows it.
    fn image(&self, name: &str, record: &ImageRecord, folder: &Path) -> Image {
        let mut image = record.shown(name);
        image.error = self
            .check(name, record, folder)
            .err()
            .map(|it| it.0.message);
        image.file = Some(folder.join(ROOT)).filter(|file| file.exists());
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            image.stored += entry.metadata().map_or(0, |data| data.blocks() * 512);
        }
        if let Some(id) = record.chunks.first() {
            image.stored += self.chunks.stored(id);
        }
        if !folder.join(ROOT).exists() {
            let cache = lazy::cache_in(&self.disks, &record.chunks);
            let here = fs::metadata(cache.join(CONTENTS)).map_or(0, |data| data.blocks() * 512);
            image.stored += here;
            // Zeros of a full cache take no blocks.
            image.present = match jiffy_store::disk_cache::is_full(&cache) {
                true => record.size,
                false => here.min(record.size),
            };
        }
        image
    }

    fn folder_of(&self, name: &str) -> Result<PathBuf> {
        Ok(self.folder.join(name::folder(name)?))
    }
}

fn cut_short(error: &tokio::task::JoinError) -> Error {
    Error::internal(format!("A change of an image was cut short: {error}."))
}

fn missing(name: &str) -> Error {
    let shown: String = name.chars().take(200).collect();
    Error::not_found(format!("There is no image {shown}.")).hint(
        "`jiffy image ls` lists the images; `jiffy image pull` and `jiffy image import` make one.",
    )
}

fn unreadable(name: &str, error: &LoadError) -> Error {
    unusable(
        name,
        &format!("its record can't be read: {}", causes::sentence(error)),
    )
    .hint(match error.is_newer() {
        true => "A newer release of Jiffy made it: use that release.".to_owned(),
        false => format!("Import the image again with `jiffy image import {name}`."),
    })
}

fn unusable(name: &str, why: &str) -> Error {
    Error::internal(format!("The image {name} can't be used: {why}.")).hint(format!(
        "Import or pull it again, or remove it with `jiffy image rm {name}`."
    ))
}
