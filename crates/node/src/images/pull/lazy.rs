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
use crate::images::record::ImageRecord;
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
        return Err(Error::invalid(format!(
            "{} is a snapshot, not an image.",
            artifact.reference()
        ))
        .hint("`jiffy run --from REF` goes on from it."));
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
    Ok(Found::Made(temporary, record, fetched))
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
