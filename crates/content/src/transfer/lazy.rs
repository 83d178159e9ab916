//! Pulls of Jiffy's artifacts: only the tables that locate the chunks are fetched. The chunks are
//! fetched when a guest reads them.

use super::PULL_NEEDS;
use super::job::Job;
use super::keep;
use super::made::{Found, Made, MadeSnapshot};
use crate::clock::unix_seconds;
use crate::error::{Error, Result, of_registry};
use crate::images::Images;
use crate::images::artifact::{MAX_SIZE, file_of, max_tail};
use crate::images::chunks::{Chunks, Place, TAIL};
use crate::model::artifact::ImageArtifact;
use crate::model::artifact::SnapshotArtifact;
use crate::model::image::ImageRecord;
use crate::model::image::LazyDisk;
use crate::model::snapshot::Manifest;
use crate::room::disk;
use crate::snapshots::disks::Pulled;
use crate::snapshots::draft::Draft;
use crate::snapshots::remote;
use jiffy_registry::artifact::IMAGE_TYPE;
use jiffy_registry::{RemoteArtifact, RemoteFile};
use jiffy_store::partial::is_partial;
use jiffy_wire::api::{ImageSource, PullImage, RegistryAccess};
use jiffy_wire::pager::{Origin, RegistryOrigin};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Begins the images of chunks of an image that `signed_by` has signed: blocking.
pub(super) fn begin(
    images: &Images,
    wanted: &PullImage,
    artifact: &RemoteArtifact,
    signed_by: Vec<String>,
    job: &Arc<Job>,
) -> Result<Found> {
    if artifact.artifact_type() != IMAGE_TYPE {
        return begin_snapshot(images, wanted, artifact, signed_by, job);
    }
    let image = ImageArtifact::read(artifact.config())?;
    let held = images.chunks.hold(&image.chunks);
    job.set_step("fetching the tables of the chunks");
    let mut fetched = artifact.config().len() as u64;
    // Parents first: a child can't be read without all of its ancestors.
    for id in image.chunks.iter().rev() {
        let of = (id.as_str(), image.size);
        fetched += begin_file(images, of, artifact, &wanted.access, job)?;
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
            signed_by,
        }),
        ..ImageRecord::default()
    };
    Ok(Found::Made(Box::new(Made {
        folder: temporary,
        record,
        fetched,
        leases: held,
    })))
}

/// Fetches a snapshot's state, and begins its RAM and its root file system.
fn begin_snapshot(
    images: &Images,
    wanted: &PullImage,
    artifact: &RemoteArtifact,
    signed_by: Vec<String>,
    job: &Arc<Job>,
) -> Result<Found> {
    let read = SnapshotArtifact::read(artifact.config())?;
    let disks = disks_of(&read, artifact)?;
    let leases = images.chunks.hold(&read.chunks);
    let mut fetched = artifact.config().len() as u64;
    job.set_step("fetching the tables of the chunks");
    for id in read.chunks.iter().rev() {
        let of = (id.as_str(), MAX_SIZE);
        fetched += begin_file(images, of, artifact, &wanted.access, job)?;
    }
    let draft = Draft::new(&images.snapshots, &images.room)?;
    let folder = draft.path();
    let state = state_of(artifact)?;
    let mut whole = state.size();
    for disk in &disks {
        whole = whole.saturating_add(disk.bytes(&images.chunks)?);
    }
    let unfetched = Arc::new(AtomicU64::new(whole));
    let _room = images.room.reserve(folder, PULL_NEEDS, unfetched.clone())?;
    job.set_step("fetching the state");
    state
        .fetch(folder, job.as_ref())
        .map_err(|error| of_registry(&error, folder))?;
    unfetched.fetch_sub(state.size(), Ordering::Relaxed);
    let file = file_of(artifact, remote::MEMORY)?;
    let memory_bytes = u64::from(read.manifest.spec.ram_mib()) << 20;
    let (tail, _room) = tail_of(&images.room, file, artifact, memory_bytes, folder, job)?;
    let origin = {
        let _one = images.chunks.recording();
        origin_of_memory(images, &read.chunks, &wanted.access, artifact)?
    };
    remote::begin_memory(folder, &read.memory, file.size(), &tail, &[origin])?;
    fetched += state.size() + tail.len() as u64;
    let mut other_bytes = state.size();
    for disk in &disks {
        job.set_step(format!("fetching the {}", disk.what()));
        fetched += disk.fetch(
            (&images.chunks, &images.room),
            &unfetched,
            folder,
            job.as_ref(),
        )?;
        other_bytes += disk.bytes_in(folder);
    }
    drop(disks);
    let manifest = Manifest {
        memory_bytes: tail.len() as u64,
        other_bytes,
        lazy_root: Some(LazyDisk {
            chunks: read.chunks,
            // Not needed: the restored guest has it mounted already.
            ext4: false,
        }),
        source: Some(ImageSource {
            reference: artifact.reference().to_string(),
            manifest: Some(artifact.manifest().digest.to_string()),
            signed_by,
        }),
        ..read.manifest
    };
    Ok(Found::Snapshot(Box::new(MadeSnapshot {
        draft,
        manifest,
        fetched,
        leases,
    })))
}

/// The state of a snapshot's VM.
fn state_of(artifact: &RemoteArtifact) -> Result<&RemoteFile> {
    let state = file_of(artifact, remote::STATE)?;
    match state.size() > remote::MAX_STATE {
        false => Ok(state),
        true => Err(Error::registry(format!(
            "The state of the snapshot {} has {} bytes; at most {} are accepted.",
            artifact.reference(),
            state.size(),
            remote::MAX_STATE
        ))),
    }
}

/// The writable disks of a snapshot's VM.
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

/// Adds this artifact, with the access of this request, as an origin of its partial images of
/// chunks and, for a snapshot, of its partial RAM.
pub(super) fn renew(
    images: &Images,
    access: &RegistryAccess,
    artifact: &RemoteArtifact,
    memory: Option<&Path>,
    job: &Arc<Job>,
) -> Result<()> {
    let chunks = &images.chunks;
    let (ids, most) = match artifact.artifact_type() {
        IMAGE_TYPE => {
            let image = ImageArtifact::read(artifact.config())?;
            (image.chunks, image.size)
        }
        _ => {
            let ids = SnapshotArtifact::read(artifact.config())?.chunks;
            if let Some(memory) = memory.filter(|memory| is_partial(memory)) {
                let _one = chunks.recording();
                let origin = origin_of_memory(images, &ids, access, artifact)?;
                remote::add_origin(memory, origin)?;
            }
            (ids, MAX_SIZE)
        }
    };
    for id in ids.iter().rev().filter(|id| chunks.is_partial(id)) {
        begin_file(images, (id, most), artifact, access, job)?;
    }
    Ok(())
}

/// Begins one image of chunks of at most `most` bytes, unless it is here; returns the bytes
/// fetched.
fn begin_file(
    images: &Images,
    (id, most): (&str, u64),
    artifact: &RemoteArtifact,
    access: &RegistryAccess,
    job: &Arc<Job>,
) -> Result<u64> {
    let chunks = &images.chunks;
    let file = file_of(artifact, &Chunks::file_name(id))?;
    let origin = |path: &Path| origin(artifact, file.name(), access, path);
    let mut fetched = None;
    loop {
        match chunks.place_of(id, file, job.as_ref())? {
            Place::Whole => break,
            Place::Same(key) => {
                // The artifact is a new origin, or its access has changed.
                chunks.add_origin(&key, || origin(&chunks.path(&key)))?;
                break;
            }
            Place::Free(key) => {
                let path = chunks.path(&key);
                let (tail, _room) = match &fetched {
                    Some(tail) => tail,
                    None => {
                        fetched.insert(tail_of(&images.room, file, artifact, most, &path, job)?)
                    }
                };
                // Another pull may have begun its own packing with this key meanwhile.
                if chunks.begin(&key, file.size(), tail, || origin(&path))? {
                    break;
                }
            }
        }
    }
    Ok(fetched.map_or(0, |(tail, _)| tail.len() as u64))
}

/// Fetches the tables of a file of chunks that holds at most `most` bytes, and reserves room for
/// them.
fn tail_of(
    room: &disk::Room,
    file: &RemoteFile,
    artifact: &RemoteArtifact,
    most: u64,
    path: &Path,
    job: &Arc<Job>,
) -> Result<(Vec<u8>, Arc<disk::Reserved>)> {
    let range = file
        .range_of(TAIL)
        .filter(|range| range.end == file.size())
        .ok_or_else(|| {
            Error::registry(format!(
                "The file {} of the artifact {} has no tables at its end.",
                file.name(),
                artifact.reference()
            ))
        })?;
    let (bytes, most) = (range.end - range.start, max_tail(most));
    if bytes > most {
        return Err(Error::registry(format!(
            "The tables of the file {} of the artifact {} have {bytes} bytes; tables of contents of the declared size have at most {most}.",
            file.name(),
            artifact.reference()
        )));
    }
    let reserved = room.reserve_bytes(path, PULL_NEEDS, bytes)?;
    let tail = file.read(range, job.as_ref());
    Ok((tail.map_err(|error| of_registry(&error, path))?, reserved))
}

/// The origin of the rest of a snapshot's RAM. Its credentials are kept beside the chunks of the
/// snapshot's root file system, which exist as long as the snapshot. Called with
/// [`Chunks::recording`] held.
fn origin_of_memory(
    images: &Images,
    chunks: &[String],
    access: &RegistryAccess,
    artifact: &RemoteArtifact,
) -> Result<Origin> {
    let beside = images.chunks.path(&chunks[0]);
    origin(artifact, remote::MEMORY, access, &beside)
}

/// The origin of the rest of a file; saves the access to it beside `beside`. Called with
/// [`Chunks::recording`] held.
fn origin(
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
        authorities: keep::authorities(access, artifact.reference().registry(), beside)?,
    }))
}
