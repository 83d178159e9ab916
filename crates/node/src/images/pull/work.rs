//! The steps of a pull.

use super::client::{Access, of_registry};
use super::job::Job;
use super::remove_blobs;
use crate::error::{Error, Result};
use crate::images::chunks::Held;
use crate::images::import::{import_error, record_of};
use crate::images::record::ImageRecord;
use crate::images::{Images, ROOT};
use crate::node::Node;
use crate::snapshots::draft::Draft;
use crate::snapshots::manifest::Manifest;
use jiffy_registry::manifest::Content;
use jiffy_registry::{
    BlobFolder, Client, Descriptor, Digest, Platform, Reference, RegistryError, RemoteArtifact,
    signature,
};
use jiffy_rootfs::{Choice, Layer, Limits, Progress, Source, import};
use jiffy_wire::api::{ErrorKind, ImageSource, PullImage, PullStep};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;
use tracing::info;

/// Largest configuration that is read, bytes.
const MAX_CONFIG: u64 = 4 << 20;
/// What making the image is called among the blobs.
const UNPACKING: &str = "unpacking";

/// What came of looking at the registry.
pub(super) enum Found {
    /// The image of this name is what the registry has, and these keys have signed it.
    UpToDate(Vec<String>),
    /// An image was made, and is not yet called anything.
    Made(Box<Made>),
    /// A snapshot is there, and is not yet called anything.
    Snapshot(Box<MadeSnapshot>),
}

/// An image without a name.
pub(super) struct Made {
    pub folder: TempDir,
    pub record: ImageRecord,
    /// Bytes that came from the registry.
    pub fetched: u64,
    /// Its images of chunks, until it has a name.
    pub _held: Option<Held>,
}

/// A snapshot without a name.
pub(super) struct MadeSnapshot {
    pub draft: Draft,
    pub manifest: Manifest,
    /// Bytes that came from the registry.
    pub fetched: u64,
    /// Its images of chunks, until it has a name.
    pub _held: Held,
}

/// What is here of the name that is pulled.
struct Have {
    /// The digest of its manifest.
    manifest: Option<String>,
    /// The image of RAM, if it is a snapshot.
    memory: Option<PathBuf>,
    /// It stays what it is, whatever the registry has by now.
    keeps: bool,
}

/// Pulls one image.
pub(super) async fn pull(
    node: &Arc<Node>,
    wanted: &PullImage,
    reference: Reference,
    platform: Platform,
    job: &Arc<Job>,
) -> Result<PullStep> {
    loop {
        let (reference, platform) = (reference.clone(), platform.clone());
        if let Some(step) = try_pull(node, wanted, reference, platform, job).await? {
            return Ok(step);
        }
    }
}

/// The same; `None` if what is here was removed while the registry was asked whether it is
/// up to date.
async fn try_pull(
    node: &Arc<Node>,
    wanted: &PullImage,
    reference: Reference,
    platform: Platform,
    job: &Arc<Job>,
) -> Result<Option<PullStep>> {
    let images = node.images();
    let name = reference.to_string();
    let have = images.find(&name).await.ok();
    // What is here was perhaps pulled by somebody who did not ask who signed it.
    let policy = images.policy();
    let verify = |source: Option<&ImageSource>| {
        wanted.access.verify_key.is_some() || policy.check("image", &name, source).is_err()
    };
    let keeps = have.is_some() && !wanted.renew && wanted.platform.is_none();
    if let Some(have) = &have
        && keeps
        && !verify(have.record.source.as_ref())
    {
        let image = images.shown(have)?;
        return Ok(Some(PullStep::Pulled { image, fetched: 0 }));
    }
    let snapshot = node.pulled_snapshot(&name);
    let keeps = keeps || have.is_none() && snapshot.is_some() && !wanted.renew;
    if let (Some((snapshot, source)), true) = (&snapshot, keeps)
        && !verify(Some(source))
    {
        return Ok(Some(PullStep::PulledSnapshot {
            snapshot: snapshot.clone(),
            fetched: 0,
        }));
    }
    job.doing(format!(
        "waiting for other pulls from {}",
        reference.registry()
    ));
    let turn = images.pulls.turns.turn(reference.registry()).await;
    job.doing(format!("asking {}", reference.registry()));
    let manifest = have
        .as_ref()
        .and_then(|have| have.record.source.as_ref())
        .and_then(|source| source.manifest.clone())
        .or(snapshot.and_then(|(_, source)| source.manifest));
    let memory = node.saved_snapshot(&name).ok();
    let memory = memory.map(|saved| saved.memory());
    let (node_too, job_too) = (Arc::clone(node), Arc::clone(job));
    let wanted = wanted.clone();
    let made = tokio::task::spawn_blocking(move || {
        let images = node_too.images();
        let have = Have {
            manifest: manifest.clone(),
            memory,
            keeps,
        };
        let found = fetch(images, &wanted, &reference, &platform, have, &job_too);
        drop(turn);
        if let (Ok(Found::UpToDate(signed_by)), Some(manifest)) = (&found, &manifest) {
            node_too.note_signed(&reference.to_string(), manifest, signed_by)?;
        }
        found
    });
    let made = made
        .await
        .map_err(|error| Error::internal(format!("A pull was cut short: {error}.")))??;
    let made = match made {
        Found::UpToDate(_) => {
            if let Some((snapshot, _)) = node.pulled_snapshot(&name) {
                node.renew_snapshot_origins(&name).await;
                let fetched = 0;
                return Ok(Some(PullStep::PulledSnapshot { snapshot, fetched }));
            }
            let found = match images.find(&name).await {
                Err(error) if error.0.kind == ErrorKind::NotFound => return Ok(None),
                found => found?,
            };
            if let Some(disk) = &found.root.lazy {
                node.renew_origins(disk).await;
            }
            let image = images.shown(&found)?;
            return Ok(Some(PullStep::Pulled { image, fetched: 0 }));
        }
        Found::Made(made) => *made,
        Found::Snapshot(made) => {
            let fetched = made.fetched;
            let kept = node.keep_snapshot(&name, made.draft, &made.manifest);
            let snapshot = kept.await?;
            return Ok(Some(PullStep::PulledSnapshot { snapshot, fetched }));
        }
    };
    images.complete(&made.folder, &made.record)?;
    node.let_image_go(&name).await;
    images
        .publish(&name, made.folder, || node.image_unused(&name))
        .await?;
    node.goldens().forget_image(&name);
    node.caches_grew();
    info!(
        image = name,
        digest = made.record.digest,
        fetched = made.fetched,
        "image pulled"
    );
    let found = images.find(&name).await?;
    if let Some(disk) = &found.root.lazy {
        // VMs may have it already, by another name.
        node.renew_origins(disk).await;
    }
    let image = images.shown(&found)?;
    let fetched = made.fetched;
    Ok(Some(PullStep::Pulled { image, fetched }))
}

/// Fetches what is missing and makes an image of it: blocking.
fn fetch(
    images: &Images,
    wanted: &PullImage,
    reference: &Reference,
    platform: &Platform,
    have: Have,
    job: &Arc<Job>,
) -> Result<Found> {
    let scratch = &images.pulls.folder;
    let failed = |error: RegistryError| of_registry(&error, scratch);
    let access = Access::new(&wanted.access, reference, scratch)?;
    let client = &access.client;
    let keys = images
        .policy()
        .keys(reference, wanted.access.verify_key.as_deref());
    let keys = keys.map_err(failed)?;
    if have.keeps {
        job.doing("checking the signature");
        let manifest = have.manifest.as_deref();
        let is_signed =
            |key: &_| verify_what_is_here(client, reference, platform, manifest, key, job);
        return keys.verify(is_signed).map(Found::UpToDate);
    }
    let top = client.manifest(reference, job.as_ref()).map_err(failed)?;
    if !keys.is_empty() {
        job.doing("checking the signature");
    }
    let signed_by = keys.verify(|key| {
        signature::verify(client, reference, &top.digest, key, job.as_ref()).map_err(failed)
    })?;
    // From here on the tag may move: what was looked at is what is taken.
    let pinned = reference.with_digest(top.digest);
    if RemoteArtifact::is_one(&top) {
        let digest = top.digest.to_string();
        let artifact = RemoteArtifact::of(client, reference, top, job.as_ref()).map_err(failed)?;
        if have.manifest.is_some_and(|have| have == digest) {
            // What it is spoken to with may be new.
            let memory = have.memory.as_deref();
            super::lazy::renew(images, &wanted.access, &artifact, memory, job)?;
            return Ok(Found::UpToDate(signed_by));
        }
        return super::lazy::begin(images, wanted, &artifact, signed_by, job);
    }
    if let Content::Image(manifest) = &top.content
        && manifest.artifact_type.is_some()
    {
        return Err(Error::invalid(format!(
            "{reference} is no image of a root file system but {:?}.",
            manifest.artifact_type.as_deref().unwrap_or_default()
        )));
    }
    let image = client
        .image(&pinned, platform, job.as_ref())
        .map_err(failed)?;
    let digest = image.fetched.digest;
    if have.manifest.is_some_and(|have| have == digest.to_string()) {
        return Ok(Found::UpToDate(signed_by));
    }
    let config = client
        .small_blob(reference, &image.manifest.config, MAX_CONFIG, job.as_ref())
        .map_err(failed)?;
    let folder = images.pulls.blobs(&digest);
    let blobs = BlobFolder::open(&folder).map_err(failed)?;
    job.doing("fetching layers");
    let layers = &image.manifest.layers;
    let missing = layers.iter().filter(|layer| blobs.get(layer).is_none());
    let missing: Vec<&Descriptor> = missing.collect();
    let bytes = |sum: u64, layer: &Descriptor| sum.saturating_add(layer.size);
    let fetched = missing.iter().copied().fold(0, bytes);
    // Unpacked they take as much again at least.
    let unpacked = layers.iter().fold(0, bytes);
    let room = &images.pulls.room;
    let _room = room.reserve(&folder, missing.into_iter(), unpacked, job)?;
    blobs
        .fetch_all(client, reference, layers, job.as_ref())
        .map_err(failed)?;
    job.doing("making the image");
    let (temporary, mut record) = unpack(images, &config, layers, &blobs, job)?;
    record.source = Some(ImageSource {
        reference: reference.to_string(),
        manifest: Some(digest.to_string()),
        signed_by,
    });
    remove_blobs(&folder);
    Ok(Found::Made(Box::new(Made {
        folder: temporary,
        record,
        fetched,
        _held: None,
    })))
}

/// Whether the image that is here is signed by this key: its own manifest, or the index
/// that the reference stands for and that names it.
fn verify_what_is_here(
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
            "{reference} was made here, so nobody has signed it."
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
            .hint("Pull it again to take what the registry has now, if that is signed.")),
    }
}

/// Layers that are here into an image.
fn unpack(
    images: &Images,
    config: &[u8],
    layers: &[Descriptor],
    blobs: &BlobFolder,
    job: &Arc<Job>,
) -> Result<(TempDir, ImageRecord)> {
    let temporary = images.temporary()?;
    let failed = |error: &dyn std::error::Error| match job.is_cancelled() {
        true => Error::invalid("The pull was given up: nobody waits for it any more."),
        false => import_error(error, &images.folder),
    };
    let layers: Vec<Layer> = layers
        .iter()
        .map(|layer| Layer {
            path: blobs.path(&layer.digest),
            media_type: layer.media_type.clone(),
            // The folder has only what its name is the digest of.
            digest: None,
            diff_id: None,
            size: Some(layer.size),
        })
        .collect();
    let choice = Choice::new(temporary.path());
    let source = Source::layers(config, &layers, &choice).map_err(|error| failed(&error))?;
    let mut watch = |progress: Progress| {
        let (Progress::Reading { done, total } | Progress::Writing { done, total }) = progress
        else {
            return ControlFlow::Continue(());
        };
        Job::moved(job, UNPACKING, done, total);
        match job.is_cancelled() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    };
    let out: &Path = &temporary.path().join(ROOT);
    let imported =
        import(source, out, &Limits::default(), &mut watch).map_err(|error| failed(&error))?;
    Ok((temporary, record_of(imported)))
}
