//! Makes images of tars and of archives of other tools.

use super::{Images, ROOT, name, writable};
use crate::clock::unix_seconds;
use crate::error::{Error, Result, is_full};
use crate::model::image::ImageRecord;
use crate::model::vm::Root;
use jiffy_rootfs::{
    Choice, ImageConfig as Built, Imported, Limits, Progress, Source, import, import_tar,
};
use jiffy_sys::causes;
use jiffy_wire::api::{Image, ImageConfig, ImageSource, ImportKind};
use std::fs;
use std::io::{self, Read};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use tempfile::TempDir;
use tracing::info;

impl Images {
    /// Makes an image of a tar. `in_use` fails if a VM needs the image that would be replaced.
    pub async fn import<F: Future<Output = Result<()>>>(
        self: &Arc<Self>,
        name: &str,
        tar: impl Read + Send + 'static,
        which: Which,
        source: Option<ImageSource>,
        in_use: impl Fn() -> F,
    ) -> Result<Image> {
        if self.folder_of(name)?.exists() {
            in_use().await?;
        }
        let (temporary, mut record) = self.make(tar, which).await?;
        record.source = source;
        self.complete(&temporary, &record)?;
        self.publish(name, temporary, in_use).await?;
        info!(image = name, digest = record.digest, "image imported");
        self.shown(&self.find(name).await?)
    }

    /// Makes an image in a temporary folder, without a name and without a record.
    pub(super) async fn make(
        &self,
        tar: impl Read + Send + 'static,
        which: Which,
    ) -> Result<(TempDir, ImageRecord)> {
        let temporary = self.temporary()?;
        let out = temporary.path().join(ROOT);
        let scratch = temporary.path().to_owned();
        let record = tokio::task::spawn_blocking(move || -> Result<ImageRecord> {
            let mut tar = tar;
            let mut head = Vec::new();
            (&mut tar)
                .take(writable::HEAD as u64)
                .read_to_end(&mut head)
                .map_err(|error| import_error(&error, &scratch))?;
            let ext4 = writable::is_ext4(&head);
            let tar = io::Cursor::new(head).chain(tar);
            if ext4 {
                return writable::import(tar, &out);
            }
            let failed = |error: &(dyn std::error::Error + 'static)| import_error(error, &scratch);
            if which.kind == Some(ImportKind::Root) {
                // Streamed: the tar itself is not stored.
                return import_tar(tar, &out, Limits::default())
                    .map(record_of)
                    .map_err(|error| failed(&error));
            }
            let mut choice = Choice::new(&scratch);
            choice.reference = which.reference;
            let source = Source::stream(tar, &choice).map_err(|error| failed(&error))?;
            let mut go_on = |_: Progress| ControlFlow::Continue(());
            import(source, &out, &Limits::default(), &mut go_on)
                .map(record_of)
                .map_err(|error| failed(&error))
        })
        .await
        .map_err(|error| Error::internal(format!("An import was cut short: {error}.")))??;
        Ok((temporary, record))
    }

    /// The full name for a new image: a plain name as it is, a reference with its registry and
    /// tag.
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
    pub fn child(
        folder: TempDir,
        parent: &Root,
        changes: &Path,
        config: ImageConfig,
        source: ImageSource,
    ) -> Result<Made> {
        let failed = |error: &(dyn std::error::Error + 'static)| import_error(error, folder.path());
        let choice = Choice::new(folder.path());
        let layer = Source::open(changes, &choice).map_err(|error| failed(&error))?;
        let out = folder.path().join(ROOT);
        let mut go_on = |_: Progress| ControlFlow::Continue(());
        let limits = Limits::default();
        let made = jiffy_rootfs::child(&parent.path, layer, &out, &limits, &mut go_on)
            .map_err(|error| failed(&error))?;
        fs::remove_file(changes).map_err(|error| Error::io("make an image", changes, &error))?;
        let shares = !made.rebuilt;
        let record = ImageRecord {
            config,
            source: Some(source),
            parent: shares.then(|| parent.digest.clone()),
            ..record_of(made.image)
        };
        Ok(Made { folder, record })
    }
}

impl Images {
    /// Is there an image of this name?
    pub fn has(&self, name: &str) -> bool {
        self.folder_of(name).is_ok_and(|folder| folder.exists())
    }

    /// A folder for an image that is being made.
    pub fn draft(&self) -> Result<TempDir> {
        self.temporary()
    }

    /// Gives the new image its name.
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

/// The record of what was just imported.
pub(crate) fn record_of(imported: Imported) -> ImageRecord {
    ImageRecord {
        digest: imported.digest,
        size: imported.size,
        entries: imported.entries,
        created: unix_seconds(),
        config: config_of(imported.config),
        ..ImageRecord::default()
    }
}

fn config_of(built: Built) -> ImageConfig {
    let unless_empty = |text: String| (!text.is_empty()).then_some(text);
    ImageConfig {
        entrypoint: built.entrypoint,
        cmd: built.cmd,
        env: built.env,
        workdir: unless_empty(built.working_dir),
        user: unless_empty(built.user),
        stop_signal: built.stop_signal,
        exposed_ports: built
            .exposed_ports
            .iter()
            .map(|port| format!("{}/{}", port.port, port.protocol))
            .collect(),
        labels: built.labels,
    }
}

/// The error in one sentence; a full disk and a client that disconnected have kinds of their own.
pub(crate) fn import_error(error: &(dyn std::error::Error + 'static), folder: &Path) -> Error {
    match causes::find::<io::Error>(error) {
        Some(error) if is_full(error) => Error::io("write the image", folder, error),
        Some(error) if error.kind() == io::ErrorKind::ConnectionAborted => {
            Error::invalid("The archive is incomplete: the client disconnected.")
        }
        _ => Error::invalid(format!(
            "The archive can't be made into an image: {}.",
            causes::sentence(error)
        ))
        .hint("`jiffy image import` takes a folder, a tar that `tar -t` can list, an OCI layout, or what `docker save` writes."),
    }
}
