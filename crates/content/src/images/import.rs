//! Makes images of tars and of archives of other tools.

use super::process::{ImportError, Imported, Importer, Input, Watch};
use super::{Images, ROOT, name, writable};
use crate::clock::unix_seconds;
use crate::error::{Error, Result};
use crate::model::image::ImageRecord;
use crate::model::vm::Root;
use jiffy_sys::causes;
use jiffy_sys::durable::is_full;
use jiffy_wire::api::{Image, ImageConfig, ImageSource, ImportKind};
use jiffy_wire::import::{Config, Source};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tempfile::TempDir;

impl Images {
    /// Makes an image of a tar, without a name; cancelled if nobody waits for it any more.
    ///
    /// # Errors
    ///
    /// If the tar can't be read or is no image, the disk is full, or `jiffy-import` can't be
    /// started or fails.
    pub async fn import(
        &self,
        tar: impl Read + Send + 'static,
        which: Which,
        source: Option<ImageSource>,
    ) -> Result<Made> {
        let (folder, record) = self.make(tar, which).await?;
        let record = ImageRecord { source, ..record };
        Ok(Made { folder, record })
    }

    /// Makes an image in a temporary folder, without a name and without a record.
    pub(super) async fn make(
        &self,
        tar: impl Read + Send + 'static,
        which: Which,
    ) -> Result<(TempDir, ImageRecord)> {
        let temporary = self.temporary()?;
        let folder = temporary.path().to_owned();
        let importer = self.importer.clone();
        let wanted = Wanted::default();
        let unwatched = Unwatched(Arc::clone(&wanted.0));
        let record = tokio::task::spawn_blocking(move || -> Result<ImageRecord> {
            let mut tar = tar;
            let mut head = Vec::new();
            (&mut tar)
                .take(writable::HEAD as u64)
                .read_to_end(&mut head)
                .map_err(|error| import_error(ImportError::Stream(error), &folder))?;
            let ext4 = writable::is_ext4(&head);
            let mut tar = io::Cursor::new(head).chain(tar);
            if ext4 && which.kind.is_none_or(|kind| kind == ImportKind::Root) {
                return writable::import(tar, &folder.join(ROOT));
            }
            let input = Input {
                source: Source::Archive {
                    // A root file system has no name.
                    reference: which
                        .reference
                        .filter(|_| which.kind != Some(ImportKind::Root)),
                    format: which.kind,
                },
                files: Vec::new(),
                stream: Some(&mut tar),
            };
            importer
                .import(input, &folder, &unwatched)
                .map(record_of)
                .map_err(|error| import_error(error, &folder))
        })
        .await
        .map_err(|error| Error::internal(format!("An import was cut short: {error}.")))??;
        Ok((temporary, record))
    }

    /// The full name for a new image: a plain name as it is, a reference with its registry and
    /// tag.
    ///
    /// # Errors
    ///
    /// If it is neither a name nor a reference, or has no registry and there is no default.
    pub fn new_name(&self, text: &str, registry: Option<&str>) -> Result<String> {
        if name::is_plain(text) {
            name::folder(text)?;
            return Ok(text.to_owned());
        }
        Ok(name::reference(text, self.registry(registry))?.to_string())
    }
}

/// Selects the image in a tar.
#[derive(Debug, Default)]
pub struct Which {
    /// Format of the archive; `None` to detect it.
    pub kind: Option<ImportKind>,
    /// Its name or tag, where a tar has several images.
    pub reference: Option<String>,
}

/// An image that was made and has no name yet.
#[derive(Debug)]
pub struct Made {
    folder: TempDir,
    record: ImageRecord,
}

impl Made {
    /// Makes an image of another one's file system and the changes of a layer in a tar: blocking.
    ///
    /// # Errors
    ///
    /// If a file can't be opened or removed, the changes are no layer, the disk is full, or
    /// `jiffy-import` can't be started or fails.
    pub fn child(
        importer: &Importer,
        folder: TempDir,
        parent: &Root,
        changes: &Path,
        config: ImageConfig,
        source: ImageSource,
    ) -> Result<Made> {
        let open = |path: &Path| {
            File::open(path).map_err(|error| Error::io("make an image", path, &error))
        };
        let input = Input {
            source: Source::Changes {
                parent: parent.path.display().to_string(),
                changes: changes.display().to_string(),
            },
            files: vec![open(&parent.path)?, open(changes)?],
            stream: None,
        };
        let unwatched = Unwatched(Arc::default());
        let imported = importer
            .import(input, folder.path(), &unwatched)
            .map_err(|error| import_error(error, folder.path()))?;
        fs::remove_file(changes).map_err(|error| Error::io("make an image", changes, &error))?;
        let shares = imported.made.shares;
        let record = ImageRecord {
            config,
            source: Some(source),
            parent: shares.then(|| parent.digest.clone()),
            ..record_of(imported)
        };
        Ok(Made { folder, record })
    }
}

impl Images {
    /// Whether there is an image of this name.
    pub fn has(&self, name: &str) -> bool {
        self.folder_of(name).is_ok_and(|folder| folder.exists())
    }

    /// Makes images.
    pub fn importer(&self) -> &Importer {
        &self.importer
    }

    /// A folder for an image that is being made.
    ///
    /// # Errors
    ///
    /// If the folder can't be made.
    pub fn draft(&self) -> Result<TempDir> {
        self.temporary()
    }

    /// Gives the new image its name.
    ///
    /// # Errors
    ///
    /// If its configuration is not valid, `in_use` fails (a VM needs the image that would be
    /// replaced), or a file can't be written or renamed.
    pub async fn keep<F: Future<Output = Result<()>>>(
        self: &Arc<Self>,
        name: &str,
        made: Made,
        in_use: impl Fn() -> F,
    ) -> Result<Image> {
        self.complete(&made.folder, &made.record)?;
        self.publish(name, made.folder, in_use).await?;
        self.shown(&self.find(name).await?)
    }
}

/// Exists as long as somebody waits for the image.
#[derive(Default)]
struct Wanted(Arc<AtomicBool>);

impl Drop for Wanted {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// An import whose progress nobody watches; true once nobody waits for the image.
struct Unwatched(Arc<AtomicBool>);

impl Watch for Unwatched {
    fn moved(&self, _: u64, _: u64) {}

    fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// The record of what was just imported.
pub(crate) fn record_of(imported: Imported) -> ImageRecord {
    ImageRecord {
        digest: imported.digest,
        size: imported.size,
        entries: imported.made.entries,
        created: unix_seconds(),
        config: config_of(imported.made.config),
        ..ImageRecord::default()
    }
}

fn config_of(config: Config) -> ImageConfig {
    let unless_empty = |text: String| (!text.is_empty()).then_some(text);
    ImageConfig {
        entrypoint: config.entrypoint,
        cmd: config.cmd,
        env: config.env,
        workdir: unless_empty(config.workdir),
        user: unless_empty(config.user),
        stop_signal: config.stop_signal,
        exposed_ports: config.exposed_ports.into_iter().collect(),
        labels: config.labels.into_iter().collect(),
    }
}

/// The error in one sentence; a full disk and a client that disconnected have kinds of their own.
pub(crate) fn import_error(error: ImportError, folder: &Path) -> Error {
    let refused = |why: &str| {
        Error::invalid(format!("The archive can't be made into an image: {why}."))
            .hint("`jiffy image import` takes a folder, a tar that `tar -t` can list, an OCI layout, or what `docker save` writes.")
    };
    match error {
        ImportError::Full => Error::io(
            "write the image",
            folder,
            &io::ErrorKind::StorageFull.into(),
        ),
        ImportError::Stream(error) if is_full(&error) => {
            Error::io("write the image", folder, &error)
        }
        ImportError::Stream(error) if error.kind() == io::ErrorKind::ConnectionAborted => {
            Error::invalid("The archive is incomplete: the client disconnected.")
        }
        ImportError::Stream(error) => refused(&format!("the archive can't be unpacked: {error}")),
        ImportError::Source(sentence) => refused(&sentence),
        ImportError::File(path, error) => Error::io("make an image", &path, &error),
        error @ ImportError::Start(..) => Error::internal(format!(
            "The image can't be made: {}.",
            causes::sentence(&error)
        ))
        .hint("Reinstall Jiffy, or give the folder of its programs with --lib or JIFFY_LIB."),
        error @ (ImportError::Process(_) | ImportError::Cancelled) => {
            Error::internal(format!("The image can't be made: {error}."))
        }
    }
}
