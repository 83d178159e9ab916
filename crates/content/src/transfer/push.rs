//! The blocking part of a push: cuts into chunks, hashes, sends and tags.

use super::Transfers;
use super::client::Access;
use super::job::Job;
use crate::error::{Error, Result, of_registry};
use crate::images::artifact::local_file;
use crate::images::chunks::Chunks;
use crate::images::{Found, Images, name};
use crate::model::artifact::{ImageArtifact, SnapshotArtifact};
use crate::roots;
use crate::snapshots::saved::Saved;
use crate::snapshots::{disks, remote};
use jiffy_registry::artifact::{Artifact, FileToPush, IMAGE_TYPE, SNAPSHOT_TYPE};
use jiffy_registry::{Client, ClientOptions, Reference, RemoteArtifact, RemoteFile};
use jiffy_wire::api::{PullStep, PushArtifact};
use jiffy_wire::pager::{Origin, RegistryOrigin};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use tracing::info;

/// Pushes an image: blocking.
///
/// # Errors
///
/// If the image can't be cut into chunks or has values that can't be pushed, there is no room, the
/// registry can't be reached or refuses, or `job` is cancelled.
pub fn image(
    images: &Images,
    transfers: &Transfers,
    found: &Found,
    wanted: &PushArtifact,
    reference: &Reference,
    job: &Arc<Job>,
) -> Result<PullStep> {
    job.set_step("cutting the image into chunks");
    let (record, _held) = images.with_chunks(&found.name)?;
    let artifact = ImageArtifact::of(&record);
    artifact.check()?;
    let scratch = &transfers.folder;
    let access = Access::new(&wanted.access, reference, scratch)?;
    let to = (&access.client, reference);
    let files = chunk_files(&images.chunks, &record.chunks, to, job)?;
    send(
        IMAGE_TYPE,
        artifact.blob()?,
        &files,
        &access.client,
        reference,
        transfers,
        job,
    )
}

/// Pushes a snapshot: blocking.
///
/// # Errors
///
/// If the snapshot can't be pushed, a disk is too large, there is no room, the registry can't be
/// reached or refuses, or `job` is cancelled.
pub fn snapshot(
    images: &Images,
    transfers: &Transfers,
    saved: &Saved,
    wanted: &PushArtifact,
    reference: &Reference,
    job: &Arc<Job>,
) -> Result<PullStep> {
    SnapshotArtifact::check(saved)?;
    job.set_step("cutting the root file system into chunks");
    let (chunks, _held) =
        images.chunks_of_root(saved.manifest.lazy_root.as_ref(), &saved.root())?;
    let scratch = &transfers.folder;
    let draft = tempfile::Builder::new()
        .prefix(".push-")
        .tempdir_in(scratch)
        .map_err(|error| Error::io("write the files to push", scratch, &error))?;
    let disk = match &saved.manifest.spec.root_disk {
        None => None,
        Some(kind) => {
            let disk = saved.volume(roots::NAME);
            Some(disks::cut_root(
                &disk,
                kind,
                (&images.chunks, &images.room),
                &chunks,
                draft.path(),
            )?)
        }
    };
    let (disk, disk_file) = disk.unzip();
    let mut volumes = Vec::new();
    let mut volume_files = Vec::new();
    for disk in &saved.manifest.spec.disks {
        job.set_step(format!("cutting the volume {} into chunks", disk.name));
        let path = saved.volume(&disk.name);
        let cut = disks::cut_volume(
            &path,
            &disk.name,
            (&images.chunks, &images.room),
            draft.path(),
        );
        let (volume, file) = cut?;
        volumes.push(volume);
        volume_files.push(file);
    }
    let artifact = SnapshotArtifact::of(saved, chunks, disk, volumes)?;
    let access = Access::new(&wanted.access, reference, scratch)?;
    let mut files = remote::files(saved, &images.room, draft.path())?;
    files.extend(disk_file);
    files.extend(volume_files);
    let to = (&access.client, reference);
    files.extend(chunk_files(&images.chunks, &artifact.chunks, to, job)?);
    send(
        SNAPSHOT_TYPE,
        artifact.blob()?,
        &files,
        &access.client,
        reference,
        transfers,
        job,
    )
}

/// Hashes the files, sends what the registry lacks, and tags the artifact: blocking.
fn send(
    artifact_type: &str,
    config: jiffy_registry::artifact::Config,
    files: &[FileToPush],
    client: &Client,
    reference: &Reference,
    transfers: &Transfers,
    job: &Arc<Job>,
) -> Result<PullStep> {
    let failed = |error| of_registry(&error, &transfers.folder);
    job.set_step("hashing the files to push");
    let annotations = BTreeMap::from([(
        "org.opencontainers.image.ref.name".to_owned(),
        reference.tag().unwrap_or_default().to_owned(),
    )]);
    let artifact =
        Artifact::plan(artifact_type, config, annotations, files, job.as_ref()).map_err(failed)?;
    job.set_step(format!("pushing to {}", reference.registry()));
    let pushed = artifact
        .push(client, reference, &transfers.folder, job.as_ref())
        .map_err(failed)?;
    info!(%reference, digest = %pushed.digest, sent = pushed.bytes_uploaded, "pushed");
    Ok(PullStep::Pushed {
        manifest: pushed.digest.to_string(),
        sent: pushed.bytes_uploaded,
        had: pushed.bytes_total.saturating_sub(pushed.bytes_uploaded),
    })
}

/// The files of these images of chunks for a push: whole ones from this node, partial ones from
/// the registry they came from.
fn chunk_files(
    chunks: &Chunks,
    ids: &[String],
    to: (&Client, &Reference),
    job: &Arc<Job>,
) -> Result<Vec<FileToPush>> {
    ids.iter()
        .map(|id| match chunks.is_partial(id) {
            false => local_file(chunks, id),
            true => {
                let name = Chunks::file_name(id);
                let keys = chunks.partial(id);
                let origins: Vec<Origin> =
                    keys.iter().flat_map(|key| chunks.origins(key)).collect();
                let remote = remote_file(&origins, &name, to, job)?;
                Ok(FileToPush::remote(&name, &remote))
            }
        })
        .collect()
}

/// A file in a registry: the first of these origins that still has it.
fn remote_file(
    origins: &[Origin],
    name: &str,
    to: (&Client, &Reference),
    job: &Arc<Job>,
) -> Result<RemoteFile> {
    let mut failed = None;
    for origin in origins {
        let Origin::Registry(origin) = origin else {
            continue;
        };
        match file_at(origin, to, job) {
            Ok(Some(file)) => return Ok(file),
            Ok(None) => {}
            Err(error) => failed = failed.or(Some(error)),
        }
    }
    Err(failed.unwrap_or_else(|| {
        Error::internal(format!(
            "Only parts of {name} are on this node, and no origin of the rest is known."
        ))
    }))
}

/// A file of an artifact, if the artifact has it. It is reached with the access saved at the
/// pull, or, in the registry that is pushed to, with the access of the push.
fn file_at(
    origin: &RegistryOrigin,
    (client, to): (&Client, &Reference),
    job: &Arc<Job>,
) -> Result<Option<RemoteFile>> {
    let from = name::reference(&origin.reference, None)?;
    let config = origin.docker_config.as_deref();
    let options = ClientOptions::from_recorded(config, origin.plain_http, &origin.authorities);
    let opened = Client::new(options)
        .and_then(|client| RemoteArtifact::open(&client, &from, job.as_ref()))
        .or_else(|error| match from.registry() == to.registry() {
            true => RemoteArtifact::open(client, &from, job.as_ref()),
            false => Err(error),
        });
    let artifact = opened.map_err(|error| of_registry(&error, Path::new(&origin.file)))?;
    Ok(artifact.file(&origin.file).cloned())
}
