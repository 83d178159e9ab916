//! An artifact of ours: only what tells where each chunk is gets here. The
//! rest comes when a guest reads it.

use super::client::of_registry;
use super::job::Job;
use super::keep;
use super::work::{Found, Made, MadeSnapshot};
use crate::clock::unix_seconds;
use crate::error::{Error, Result};
use crate::images::Images;
use crate::images::artifact::{ImageArtifact, MAX_TAIL, TAIL, file_of};
use crate::images::chunks::Chunks;
use crate::images::lazy::LazyDisk;
use crate::images::record::ImageRecord;
use crate::snapshots::disks::Pulled;
use crate::snapshots::draft::Draft;
use crate::snapshots::manifest::Manifest;
use crate::snapshots::remote::{self, SnapshotArtifact};
use jiffy_registry::artifact::IMAGE_TYPE;
use jiffy_registry::{RemoteArtifact, RemoteFile};
use jiffy_store::partial::is_partial;
use jiffy_wire::api::{ImageSource, PullImage, RegistryAccess};
use jiffy_wire::pager::{Origin, RegistryOrigin};
use std::path::Path;
use std::sync::Arc;

/// Begins the images of chunks of an image: blocking.
pub(super) fn begin(
    images: &Images,
    wanted: &PullImage,
    artifact: &RemoteArtifact,
    job: &Arc<Job>,
) -> Result<Found> {
    if artifact.artifact_type() != IMAGE_TYPE {
        return begin_snapshot(images, wanted, artifact, job);
    }
    let image = ImageArtifact::read(artifact.config())?;
    let held = images.chunks.hold(&image.chunks);
    job.doing("fetching where the chunks are");
    let mut fetched = artifact.config().len() as u64;
    // Parents first: a child is there only with all of them.
    for id in image.chunks.iter().rev() {
        let file = file_of(artifact, &Chunks::file_name(id))?;
        fetched += begin_file(&images.chunks, id, file, artifact, &wanted.access, job)?;
    }
    let temporary = images.temporary()?;
    let record = ImageRecord {
        digest: image.digest,
        size: image.size,
        entries: image.entries,
        created: unix_seconds(),
        ext4: image.ext4,
        config: image.config,
        chunks: image.chunks,
        source: Some(ImageSource {
            reference: artifact.reference().to_string(),
            manifest: Some(artifact.manifest().digest.to_string()),
        }),
        ..ImageRecord::default()
    };
    Ok(Found::Made(Box::new(Made {
        folder: temporary,
        record,
        fetched,
        _held: Some(held),
    })))
}

/// Fetches a snapshot's state, and begins its memory and root file system.
fn begin_snapshot(
    images: &Images,
    wanted: &PullImage,
    artifact: &RemoteArtifact,
    job: &Arc<Job>,
) -> Result<Found> {
    let read = SnapshotArtifact::read(artifact.config())?;
    let disks = disks_of(&read, artifact)?;
    let held = images.chunks.hold(&read.chunks);
    let mut fetched = artifact.config().len() as u64;
    job.doing("fetching where the chunks are");
    for id in read.chunks.iter().rev() {
        let file = file_of(artifact, &Chunks::file_name(id))?;
        fetched += begin_file(&images.chunks, id, file, artifact, &wanted.access, job)?;
    }
    let draft = Draft::new(&images.snapshots)?;
    let folder = draft.path();
    let state = file_of(artifact, remote::STATE)?;
    if state.size() > remote::MAX_STATE {
        return Err(Error::registry(format!(
            "The state of the snapshot {} has {} bytes; at most {} are taken.",
            artifact.reference(),
            state.size(),
            remote::MAX_STATE
        )));
    }
    job.doing("fetching the state");
    state
        .fetch(folder, job.as_ref())
        .map_err(|error| of_registry(&error, folder))?;
    let file = file_of(artifact, remote::MEMORY)?;
    let tail = tail_of(file, artifact, folder, job)?;
    let origin = origin_of_memory(images, &read.chunks, &wanted.access, artifact)?;
    remote::begin_memory(folder, &read.memory, file.size(), &tail, &[origin])?;
    fetched += state.size() + tail.len() as u64;
    let mut other_bytes = state.size();
    for disk in &disks {
        job.doing(format!("fetching the {}", disk.what()));
        fetched += disk.fetch(&images.chunks, folder, job.as_ref())?;
        other_bytes += disk.bytes_in(folder);
    }
    drop(disks);
    let manifest = Manifest {
        memory_bytes: tail.len() as u64,
        other_bytes,
        lazy_root: Some(LazyDisk {
            chunks: read.chunks,
            // Nobody mounts it anew.
            ext4: false,
        }),
        source: Some(ImageSource {
            reference: artifact.reference().to_string(),
            manifest: Some(artifact.manifest().digest.to_string()),
        }),
        ..read.manifest
    };
    Ok(Found::Snapshot(Box::new(MadeSnapshot {
        draft,
        manifest,
        fetched,
        _held: held,
    })))
}

/// The disks of a snapshot's VM that it writes to.
fn disks_of<'a>(
    read: &'a SnapshotArtifact,
    artifact: &'a RemoteArtifact,
) -> Result<Vec<Pulled<'a>>> {
    let root = read
        .root_disk
        .as_ref()
        .zip(read.manifest.spec.root_disk.as_ref());
    let root = root.map(|(id, kind)| Pulled::root(artifact, kind, id, &read.chunks));
    let volumes = read.volumes.iter();
    let volumes = volumes.map(|volume| Pulled::volume(artifact, volume));
    root.into_iter().chain(volumes).collect()
}

/// What is missing of this artifact's images is fetched so from now on; of a
/// snapshot what is missing of its memory, too.
pub(super) fn renew(
    images: &Images,
    access: &RegistryAccess,
    artifact: &RemoteArtifact,
    memory: Option<&Path>,
) -> Result<()> {
    let chunks = &images.chunks;
    let ids = match artifact.artifact_type() {
        IMAGE_TYPE => ImageArtifact::read(artifact.config())?.chunks,
        _ => {
            let ids = SnapshotArtifact::read(artifact.config())?.chunks;
            if let Some(memory) = memory.filter(|memory| is_partial(memory)) {
                let origin = origin_of_memory(images, &ids, access, artifact)?;
                remote::add_origin(memory, origin)?;
            }
            ids
        }
    };
    for id in ids.iter().filter(|id| chunks.is_partial(id)) {
        let file = file_of(artifact, &Chunks::file_name(id))?;
        let origin = origin(artifact, file.name(), access, &chunks.path(id))?;
        chunks.add_origin(id, origin)?;
    }
    Ok(())
}

/// Begins one image of chunks, unless it is there; gives the bytes fetched.
pub(super) fn begin_file(
    chunks: &Chunks,
    id: &str,
    file: &RemoteFile,
    artifact: &RemoteArtifact,
    access: &RegistryAccess,
    job: &Arc<Job>,
) -> Result<u64> {
    let path = chunks.path(id);
    if chunks.has(id) {
        // Who may have it by now, or how it is reached, may have changed.
        if chunks.is_partial(id) {
            chunks.add_origin(id, origin(artifact, file.name(), access, &path)?)?;
        }
        return Ok(0);
    }
    let tail = tail_of(file, artifact, &path, job)?;
    let origin = origin(artifact, file.name(), access, &path)?;
    chunks.begin(id, file.size(), &tail, &[origin])?;
    Ok(tail.len() as u64)
}

/// The tables of a file of chunks.
pub(super) fn tail_of(
    file: &RemoteFile,
    artifact: &RemoteArtifact,
    path: &Path,
    job: &Arc<Job>,
) -> Result<Vec<u8>> {
    let range = file
        .range_of(TAIL)
        .filter(|range| range.end == file.size() && range.end - range.start <= MAX_TAIL)
        .ok_or_else(|| {
            Error::registry(format!(
                "The file {} of the artifact {} has no tables at its end.",
                file.name(),
                artifact.reference()
            ))
        })?;
    file.read(range, job.as_ref())
        .map_err(|error| of_registry(&error, path))
}

/// Where the rest of a snapshot's memory can be had. How is kept with the chunks
/// of its root file system, which stay as long as it does.
fn origin_of_memory(
    images: &Images,
    chunks: &[String],
    access: &RegistryAccess,
    artifact: &RemoteArtifact,
) -> Result<Origin> {
    let beside = images.chunks.path(&chunks[0]);
    origin(artifact, remote::MEMORY, access, &beside)
}

/// Where the rest of a file can be had.
pub(super) fn origin(
    artifact: &RemoteArtifact,
    file: &str,
    access: &RegistryAccess,
    beside: &Path,
) -> Result<Origin> {
    Ok(Origin::Registry(RegistryOrigin {
        reference: artifact.reference().to_string(),
        file: file.to_owned(),
        docker_config: keep::credentials(access, artifact.reference().registry(), beside)?,
        plain_http: access.plain_http,
        authorities: keep::authorities(access, beside)?,
    }))
}
