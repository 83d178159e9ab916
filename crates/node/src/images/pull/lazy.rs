//! An artifact of ours: only what tells where each chunk is gets here. The
//! rest comes when a guest reads it.

use super::client::of_registry;
use super::job::Job;
use super::work::Found;
use crate::clock::unix_seconds;
use crate::error::{Error, Result};
use crate::images::Images;
use crate::images::artifact::{ImageArtifact, MAX_TAIL, TAIL};
use crate::images::chunks::Chunks;
use crate::images::lazy::LazyDisk;
use crate::images::record::ImageRecord;
use crate::snapshots::draft::Draft;
use crate::snapshots::manifest::Manifest;
use crate::snapshots::remote::{self, SnapshotArtifact};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiffy_registry::artifact::IMAGE_TYPE;
use jiffy_registry::{RemoteArtifact, RemoteFile};
use jiffy_wire::api::{ImageSource, PullImage, RegistryAccess};
use jiffy_wire::pager::{Origin, RegistryOrigin};
use std::fs;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
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
        config: image.config,
        chunks: image.chunks,
        source: Some(ImageSource {
            reference: artifact.reference().to_string(),
            manifest: Some(artifact.manifest().digest.to_string()),
        }),
        ..ImageRecord::default()
    };
    Ok(Found::Made(temporary, Box::new(record), fetched))
}

/// Fetches a snapshot's state, and begins its memory and root file system.
fn begin_snapshot(
    images: &Images,
    wanted: &PullImage,
    artifact: &RemoteArtifact,
    job: &Arc<Job>,
) -> Result<Found> {
    let read = SnapshotArtifact::read(artifact.config())?;
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
    // Credentials are kept where the chunks of its root file system are.
    let beside = images.chunks.path(&read.memory);
    let origin = origin(artifact, file.name(), &wanted.access, &beside)?;
    remote::begin_memory(folder, &read.memory, file.size(), &tail, &[origin])?;
    fetched += state.size() + tail.len() as u64;
    let manifest = Manifest {
        memory_bytes: tail.len() as u64,
        other_bytes: state.size(),
        lazy_root: Some(LazyDisk {
            chunks: read.chunks,
        }),
        source: Some(ImageSource {
            reference: artifact.reference().to_string(),
            manifest: Some(artifact.manifest().digest.to_string()),
        }),
        ..read.manifest
    };
    Ok(Found::Snapshot(draft, Box::new(manifest), fetched))
}

/// The file of this name, which must be there.
pub(super) fn file_of<'a>(artifact: &'a RemoteArtifact, name: &str) -> Result<&'a RemoteFile> {
    artifact.file(name).ok_or_else(|| {
        Error::registry(format!(
            "The artifact {} has no file {name}.",
            artifact.reference()
        ))
    })
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
    if chunks.has(id) {
        return Ok(0);
    }
    let path = chunks.path(id);
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
        docker_config: credentials(artifact, access, beside)?,
        plain_http: access.plain_http,
    }))
}

/// Keeps credentials for as long as something may have to be fetched with
/// them, in a file as Docker has it, beside that.
fn credentials(
    artifact: &RemoteArtifact,
    access: &RegistryAccess,
    beside: &Path,
) -> Result<Option<PathBuf>> {
    let Some((user, password)) = &access.credentials else {
        return Ok(None);
    };
    let path = beside.with_extension("auth.json");
    let failed = |error: &std::io::Error| Error::io("keep credentials", &path, error);
    let auth = STANDARD.encode(format!("{user}:{password}"));
    let host = artifact.reference().registry();
    let text = serde_json::json!({ "auths": { host: { "auth": auth } } }).to_string();
    let mut file = fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&path)
        .map_err(|error| failed(&error))?;
    std::io::Write::write_all(&mut file, text.as_bytes()).map_err(|error| failed(&error))?;
    Ok(Some(path))
}
