//! The image that comes with Jiffy.

use super::import::Which;
use super::record;
use super::{Images, ROOT};
use crate::clock::unix_seconds;
use crate::durable;
use crate::error::{Error, Result};
use crate::model::image::ImageRecord;
use jiffy_wire::api::ImportKind;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::Ordering;
use tempfile::TempDir;
use tracing::info;

/// Its name.
pub const BASE: &str = "base";

impl Images {
    pub(super) async fn provide_base(&self) -> Result<()> {
        let _one = self.changing.lock().await;
        if self.base_ready.load(Ordering::Acquire) {
            return Ok(());
        }
        let prebuilt = self.share.join("base.erofs");
        let source = if prebuilt.exists() {
            prebuilt
        } else {
            self.share.join("base.tar")
        };
        let stamp = fs::metadata(&source).map(|data| (data.len(), data.mtime()));
        let folder = self.folder_of(BASE)?;
        let have = match ImageRecord::load(&folder) {
            Ok(have) => Some(have).filter(|_| durable::check_not_empty(&folder.join(ROOT)).is_ok()),
            // A newer release's record of a user's image is kept; a built-in image is made again.
            Err(error) if error.is_newer() && !record::was_built_in(&folder) => {
                return Err(super::unreadable(BASE, &error));
            }
            Err(_) => None,
        };
        let up_to_date = match (&have, &stamp) {
            // An image that the user imported under this name is kept.
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
                    .hint("Reinstall Jiffy, or give its share folder with --share or JIFFY_SHARE.")
                })?;
            let (temporary, mut record) = if source.extension().is_some_and(|kind| kind == "erofs")
            {
                self.copy_prebuilt(file).await?
            } else {
                self.make(
                    file,
                    Which {
                        kind: Some(ImportKind::Root),
                        reference: None,
                    },
                )
                .await?
            };
            record.built_in = Some(stamp);
            self.complete(&temporary, &record)?;
            self.put(BASE, temporary)?;
            info!("built-in image made");
        }
        self.base_ready.store(true, Ordering::Release);
        Ok(())
    }

    async fn copy_prebuilt(&self, mut source: File) -> Result<(TempDir, ImageRecord)> {
        let temporary = self.temporary()?;
        let out = temporary.path().join(ROOT);
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
            created: unix_seconds(),
            ..ImageRecord::default()
        };
        Ok((temporary, record))
    }
}
