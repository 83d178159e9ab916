//! Images of root file systems: tars made into EROFS, and the built-in `base`.

use crate::clock::unix_seconds;
use crate::durable;
use crate::error::{Error, Result, is_full};
use crate::names;
use crate::paths::Paths;
use crate::vm::record::Root;
use jiffy_rootfs::{ImportError, Limits, import_tar};
use jiffy_wire::api::Image;
use rustix::fs::{CWD, RenameFlags};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::Mutex;
use tracing::{info, warn};

/// The image that comes with Jiffy.
pub const BASE: &str = "base";
const FORMAT: &str = "jiffy-image";
const VERSION: u32 = 1;

/// The images of a node.
#[derive(Debug)]
pub struct Images {
    folder: PathBuf,
    share: PathBuf,
    /// One change at a time.
    changing: Mutex<()>,
    /// The built-in image is there and from this release.
    base_ready: AtomicBool,
    /// Digests by file and inode, as their records have them.
    digests: std::sync::Mutex<HashMap<PathBuf, (u64, String)>>,
}

/// `image.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct ImageRecord {
    digest: String,
    size: u64,
    entries: u64,
    created: u64,
    /// Size and modification time of the file that `base` was made from.
    built_in: Option<(u64, i64)>,
}

impl Images {
    /// The images in these folders.
    pub fn new(paths: &Paths) -> Images {
        Images {
            folder: paths.images(),
            share: paths.share.join("images"),
            changing: Mutex::default(),
            base_ready: AtomicBool::new(false),
            digests: std::sync::Mutex::default(),
        }
    }

    /// The file of an image and its digest; made now if it is the built-in
    /// one. An image's file never changes: another one is another file.
    pub async fn find(&self, name: &str) -> Result<Root> {
        if name == BASE && !self.base_ready.load(Ordering::Acquire) {
            self.provide_base().await?;
        }
        let path = self.file(name);
        if let Ok(data) = fs::metadata(&path) {
            let digest = self.digest(name, &path, data.ino())?;
            return Ok(Root { path, digest });
        }
        if name == BASE {
            self.base_ready.store(false, Ordering::Release);
        }
        Err(Error::not_found(format!("There is no image {name}."))
            .hint("`jiffy image ls` lists the images; `jiffy image import` makes one."))
    }

    fn digest(&self, name: &str, path: &Path, inode: u64) -> Result<String> {
        let mut digests = self.digests.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, digest)) = digests.get(path).filter(|(known, _)| *known == inode) {
            return Ok(digest.clone());
        }
        let record = self.record(name).map_err(|error| {
            Error::internal(format!(
                "The record of the image {name} can't be read: {error}."
            ))
            .hint(format!(
                "Import the image again with `jiffy image import {name}`."
            ))
        })?;
        digests.insert(path.to_owned(), (inode, record.digest.clone()));
        Ok(record.digest)
    }

    /// The inode may be another image's from now on.
    fn forget_digest(&self, name: &str) {
        let mut digests = self.digests.lock().unwrap_or_else(PoisonError::into_inner);
        digests.remove(&self.file(name));
    }

    /// All images, by name.
    pub fn list(&self) -> Result<Vec<Image>> {
        let mut images = Vec::new();
        let entries = fs::read_dir(&self.folder)
            .map_err(|error| Error::io("list images", &self.folder, &error))?;
        for entry in entries.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if names::check("image", &name).is_err() {
                continue;
            }
            match self.record(&name) {
                Ok(record) => images.push(record.shown(&name)),
                Err(error) => warn!(image = name, %error, "an image's record can't be read"),
            }
        }
        images.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(images)
    }

    /// Makes an image of a tar. `in_use` tells whether a VM needs the image
    /// that is replaced.
    pub async fn import(
        &self,
        name: &str,
        tar: impl Read + Send + 'static,
        in_use: impl Fn() -> Result<()>,
    ) -> Result<Image> {
        names::check("image", name)?;
        let exists = || self.folder.join(name).exists();
        if exists() {
            in_use()?;
        }
        let (temporary, record) = self.make(tar, None).await?;
        let _one = self.changing.lock().await;
        if exists() {
            in_use()?;
        }
        self.put(name, temporary)?;
        info!(image = name, digest = record.digest, "image imported");
        Ok(record.shown(name))
    }

    /// Removes an image; `in_use` refuses if a VM needs it.
    pub async fn remove(&self, name: &str, in_use: impl Fn() -> Result<()>) -> Result<()> {
        names::check("image", name)?;
        let _one = self.changing.lock().await;
        let path = self.folder.join(name);
        if !path.exists() {
            return Err(Error::not_found(format!("There is no image {name}."))
                .hint("`jiffy image ls` lists the images."));
        }
        in_use()?;
        self.forget_digest(name);
        if name == BASE {
            self.base_ready.store(false, Ordering::Release);
        }
        let gone = tempfile::Builder::new()
            .prefix(".gone-")
            .tempdir_in(&self.folder)
            .map_err(|error| Error::io("remove an image", &path, &error))?;
        fs::rename(&path, gone.path().join("image"))
            .map_err(|error| Error::io("remove an image", &path, &error))?;
        Ok(())
    }

    async fn provide_base(&self) -> Result<()> {
        let _one = self.changing.lock().await;
        if self.base_ready.load(Ordering::Acquire) {
            return Ok(());
        }
        let ready_made = self.share.join("base.erofs");
        let source = if ready_made.exists() {
            ready_made
        } else {
            self.share.join("base.tar")
        };
        let stamp = fs::metadata(&source).map(|data| (data.len(), data.mtime()));
        let have = self.record(BASE).ok().filter(|_| self.file(BASE).exists());
        let up_to_date = match (&have, &stamp) {
            // One that the user imported under this name stays.
            (Some(have), _) if have.built_in.is_none() => true,
            (Some(have), Ok(stamp)) => have.built_in == Some(*stamp),
            (Some(_), Err(_)) => true,
            (None, _) => false,
        };
        if !up_to_date {
            let (stamp, file) = stamp
                .and_then(|stamp| Ok((stamp, File::open(&source)?)))
                .map_err(|error| {
                    Error::not_found(format!(
                        "The built-in image can't be made: {}: {error}.",
                        source.display()
                    ))
                    .hint("Install Jiffy whole, or name its share folder with --share or JIFFY_SHARE.")
                })?;
            let (temporary, _) = if source.extension().is_some_and(|kind| kind == "erofs") {
                self.take_ready_made(file, stamp).await?
            } else {
                self.make(file, Some(stamp)).await?
            };
            self.put(BASE, temporary)?;
            info!("built-in image made");
        }
        self.base_ready.store(true, Ordering::Release);
        Ok(())
    }

    /// An image in a folder of its own that is not yet called anything.
    async fn make(
        &self,
        tar: impl Read + Send + 'static,
        built_in: Option<(u64, i64)>,
    ) -> Result<(tempfile::TempDir, ImageRecord)> {
        let temporary = self.temporary()?;
        let out = temporary.path().join("image.erofs");
        let path = out.clone();
        let imported =
            tokio::task::spawn_blocking(move || import_tar(tar, &path, Limits::default()))
                .await
                .map_err(|error| Error::internal(format!("An import was cut short: {error}.")))?
                .map_err(|error| import_error(&error, &self.folder))?;
        let record = ImageRecord {
            digest: imported.digest,
            size: imported.size,
            entries: imported.entries,
            created: unix_seconds(),
            built_in,
        };
        self.complete(&temporary, &record)?;
        Ok((temporary, record))
    }

    async fn take_ready_made(
        &self,
        mut source: File,
        stamp: (u64, i64),
    ) -> Result<(tempfile::TempDir, ImageRecord)> {
        let temporary = self.temporary()?;
        let out = temporary.path().join("image.erofs");
        let copy = out.clone();
        let copied = tokio::task::spawn_blocking(move || -> io::Result<(u64, String)> {
            let mut to = File::create(&copy)?;
            let size = io::copy(&mut source, &mut to)?;
            to.sync_all()?;
            let mut hasher = blake3::Hasher::new();
            hasher.update_reader(File::open(&copy)?)?;
            Ok((size, hasher.finalize().to_hex().to_string()))
        });
        let (size, digest) = copied
            .await
            .unwrap_or_else(|error| Err(io::Error::other(error)))
            .map_err(|error| Error::io("copy the built-in image", &out, &error))?;
        let record = ImageRecord {
            digest,
            size,
            entries: 0,
            created: unix_seconds(),
            built_in: Some(stamp),
        };
        self.complete(&temporary, &record)?;
        Ok((temporary, record))
    }

    fn temporary(&self) -> Result<tempfile::TempDir> {
        tempfile::Builder::new()
            .prefix(".new-")
            .tempdir_in(&self.folder)
            .map_err(|error| Error::io("make an image", &self.folder, &error))
    }

    fn complete(&self, temporary: &tempfile::TempDir, record: &ImageRecord) -> Result<()> {
        let path = temporary.path().join("image.json");
        durable::save(&path, FORMAT, VERSION, record, true)
            .map_err(|error| Error::io("write an image's record", &path, &error))
    }

    /// Gives a finished image its name; what had it before is removed.
    fn put(&self, name: &str, temporary: tempfile::TempDir) -> Result<()> {
        let to = self.folder.join(name);
        let failed = |error: io::Error| Error::io("name an image", &to, &error);
        self.forget_digest(name);
        if to.exists() {
            // The old one is removed with the temporary folder. VMs that
            // still read it keep it open.
            let flags = RenameFlags::EXCHANGE;
            rustix::fs::renameat_with(CWD, temporary.path(), CWD, &to, flags)
                .map_err(|error| failed(error.into()))?;
        } else {
            fs::rename(temporary.path(), &to).map_err(failed)?;
            let _ = temporary.keep();
        }
        jiffy_sys::durable::sync_folder_of(&to).map_err(failed)
    }

    fn record(&self, name: &str) -> std::result::Result<ImageRecord, durable::LoadError> {
        durable::load(&self.folder.join(name).join("image.json"), FORMAT, VERSION)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name).join("image.erofs")
    }
}

impl ImageRecord {
    fn shown(&self, name: &str) -> Image {
        Image {
            name: name.to_owned(),
            digest: self.digest.clone(),
            size: self.size,
            entries: self.entries,
            created: self.created,
        }
    }
}

fn import_error(error: &ImportError, folder: &Path) -> Error {
    let mut message = error.to_string();
    let mut source = std::error::Error::source(error);
    let mut own: Option<&io::Error> = None;
    while let Some(cause) = source {
        let text = cause.to_string();
        if !message.contains(&text) {
            message = format!("{message}: {text}");
        }
        own = own.or(cause.downcast_ref::<io::Error>());
        source = cause.source();
    }
    match own {
        Some(error) if is_full(error) => Error::io("write the image", folder, error),
        Some(error) if error.kind() == io::ErrorKind::ConnectionAborted => {
            Error::invalid("The archive ended early: the client went away.")
        }
        _ => Error::invalid(format!(
            "The archive can't be made into an image: {message}."
        ))
        .hint("`jiffy image import` takes a folder, or a tar that `tar -t` can list."),
    }
}
