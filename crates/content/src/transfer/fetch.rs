//! The blocking part of a pull: fetches what the registry has and makes an image of it.

use super::client::Access;
use super::job::{Job, ToFetch};
use super::made::{Found, Made};
use super::{PULL_NEEDS, Transfers, lazy, remove_blobs};
use crate::error::{Error, Result, of_registry};
use crate::images::Images;
use crate::images::import::{import_error, record_of};
use crate::images::process::{ImportError, Input, Watch};
use crate::model::image::ImageRecord;
use jiffy_registry::{
    BlobFolder, Client, Content, Descriptor, Digest, Platform, Reference, RegistryError,
    RemoteArtifact, signature,
};
use jiffy_wire::api::{ImageSource, PullImage};
use jiffy_wire::import::{Layer, Source};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;

/// Largest configuration that is read, bytes.
const MAX_CONFIG: u64 = 4 << 20;
/// Name of the unpacking step among the blobs of the progress.
const UNPACKING: &str = "unpacking";

/// What this node already has under the name that is pulled.
pub struct Existing {
    /// The digest of its manifest.
    pub manifest: Option<String>,
    /// The image of RAM, if it is a snapshot.
    pub memory: Option<PathBuf>,
    /// Don't replace it, even if the registry has something newer.
    pub keep: bool,
}

/// Fetches what is missing and makes an image or a snapshot of it: blocking.
///
/// # Errors
///
/// If the registry can't be reached or refuses, a required signature is missing, it is no image for
/// the platform, a blob is damaged, there is no room, the image can't be made, or `job` is
/// cancelled.
pub fn fetch(
    images: &Images,
    transfers: &Transfers,
    wanted: &PullImage,
    reference: &Reference,
    platform: &Platform,
    existing: Existing,
    job: &Arc<Job>,
) -> Result<Found> {
    let scratch = &transfers.folder;
    let failed = |error: RegistryError| of_registry(&error, scratch);
    let access = Access::new(&wanted.access, reference, scratch)?;
    let client = &access.client;
    let keys = images
        .policy()
        .keys(reference, wanted.access.verify_key.as_deref());
    let keys = keys.map_err(failed)?;
    if existing.keep {
        job.set_step("checking the signature");
        let manifest = existing.manifest.as_deref();
        let is_signed = |key: &_| verify_existing(client, reference, platform, manifest, key, job);
        return keys.verify(is_signed).map(Found::UpToDate);
    }
    let top = client.manifest(reference, job.as_ref()).map_err(failed)?;
    if !keys.is_empty() {
        job.set_step("checking the signature");
    }
    let signed_by = keys.verify(|key| {
        signature::verify(client, reference, &top.digest, key, job.as_ref()).map_err(failed)
    })?;
    // Pinned by digest, because the tag may move from here on.
    let pinned = reference.with_digest(top.digest);
    if RemoteArtifact::is_artifact(&top) {
        let digest = top.digest.to_string();
        let artifact = RemoteArtifact::of(client, reference, top, job.as_ref()).map_err(failed)?;
        if existing.manifest.is_some_and(|existing| existing == digest) {
            // The request's credentials or authorities may be new.
            let memory = existing.memory.as_deref();
            lazy::renew(images, &wanted.access, &artifact, memory, job)?;
            return Ok(Found::UpToDate(signed_by));
        }
        return lazy::begin(images, wanted, &artifact, signed_by, job);
    }
    if let Content::Image(manifest) = &top.content
        && manifest.artifact_type.is_some()
    {
        return Err(Error::invalid(format!(
            "{reference} is not an image of a root file system; its type is {:?}.",
            manifest.artifact_type.as_deref().unwrap_or_default()
        )));
    }
    let image = client
        .image(&pinned, platform, job.as_ref())
        .map_err(failed)?;
    let digest = image.fetched.digest;
    if existing
        .manifest
        .is_some_and(|existing| existing == digest.to_string())
    {
        return Ok(Found::UpToDate(signed_by));
    }
    let source = ImageSource {
        reference: reference.to_string(),
        manifest: Some(digest.to_string()),
        signed_by,
    };
    fetch_layers(images, transfers, client, reference, image, source, job)
}

/// Fetches the layers of an image and makes an image of them.
fn fetch_layers(
    images: &Images,
    transfers: &Transfers,
    client: &Client,
    reference: &Reference,
    image: jiffy_registry::Image,
    source: ImageSource,
    job: &Arc<Job>,
) -> Result<Found> {
    let failed = |error: RegistryError| of_registry(&error, &transfers.folder);
    let config = client
        .small_blob(reference, &image.manifest.config, MAX_CONFIG, job.as_ref())
        .map_err(failed)?;
    let folder = transfers.blobs(&image.fetched.digest);
    let blobs = BlobFolder::open(&folder).map_err(failed)?;
    job.set_step("fetching layers");
    let layers = &image.manifest.layers;
    let missing = layers.iter().filter(|layer| blobs.get(layer).is_none());
    let missing: Vec<&Descriptor> = missing.collect();
    let bytes = |sum: u64, layer: &Descriptor| sum.saturating_add(layer.size);
    let fetched = missing.iter().copied().fold(0, bytes);
    // The unpacked image is assumed to need at least as much again.
    let unpacked = layers.iter().fold(0, bytes);
    let to_fetch = ToFetch::new(missing.into_iter(), unpacked, job);
    let _room = images.room.reserve(&folder, PULL_NEEDS, to_fetch)?;
    blobs
        .fetch_all(client, reference, layers, job.as_ref())
        .map_err(failed)?;
    job.set_step("making the image");
    let (temporary, mut record) = unpack(images, &config, layers, &blobs, job)?;
    record.source = Some(source);
    remove_blobs(&folder);
    Ok(Found::Made(Box::new(Made {
        folder: temporary,
        record,
        fetched,
        leases: Vec::new(),
    })))
}

/// Verifies that this key has signed the image that is here: its manifest, or the index that the
/// reference names and that lists the manifest.
fn verify_existing(
    client: &Client,
    reference: &Reference,
    platform: &Platform,
    manifest: Option<&str>,
    key: &signature::PublicKey,
    job: &Arc<Job>,
) -> Result<()> {
    let failed = |error: RegistryError| of_registry(&error, Path::new(""));
    let digest = manifest.and_then(|digest| digest.parse::<Digest>().ok());
    let Some(digest) = digest else {
        return Err(Error::invalid(format!(
            "{reference} was made on this node and has no signature."
        )));
    };
    let verify = |digest| signature::verify(client, reference, digest, key, job.as_ref());
    let unsigned = match verify(&digest) {
        Err(error @ RegistryError::Unsigned { .. }) => error,
        other => return other.map_err(failed),
    };
    let top = client.manifest(reference, job.as_ref()).map_err(failed)?;
    let index = top.digest;
    let chosen = client.image_of(reference, top, platform, job.as_ref());
    match chosen {
        Ok(image) if image.fetched.digest == digest && index != digest => {
            verify(&index).map_err(failed)
        }
        _ => Err(failed(unsigned)
            .hint("Pull it again: the image that the registry has now may be signed.")),
    }
}

/// Makes an image of layers that were fetched.
fn unpack(
    images: &Images,
    config: &[u8],
    layers: &[Descriptor],
    blobs: &BlobFolder,
    job: &Arc<Job>,
) -> Result<(TempDir, ImageRecord)> {
    let temporary = images.temporary()?;
    let failed = |error: ImportError| match error {
        ImportError::Cancelled => {
            Error::invalid("The pull was cancelled: its last client disconnected.")
        }
        error => import_error(error, &images.folder),
    };
    let mut files = Vec::new();
    let mut described = Vec::new();
    for layer in layers {
        let path = blobs.path(&layer.digest);
        files.push(
            File::open(&path).map_err(|error| failed(ImportError::File(path.clone(), error)))?,
        );
        // Its digest is not checked again: blobs in the folder are named by the digest they were
        // checked against.
        described.push(Layer {
            name: path.display().to_string(),
            media_type: layer.media_type.clone(),
            size: layer.size,
        });
    }
    let input = Input {
        source: Source::Layers {
            config: config.to_vec(),
            layers: described,
        },
        files,
        stream: None,
    };
    let imported = images
        .importer
        .import(input, temporary.path(), &Unpacking(job))
        .map_err(failed)?;
    Ok((temporary, record_of(imported)))
}

/// Reports the import to the watchers of a pull.
struct Unpacking<'a>(&'a Job);

impl Watch for Unpacking<'_> {
    fn moved(&self, done: u64, total: u64) {
        Job::moved(self.0, UNPACKING, done, total);
    }

    fn is_cancelled(&self) -> bool {
        self.0.is_cancelled()
    }
}
