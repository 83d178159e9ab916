//! Images to registries.

use super::artifact::{ImageArtifact, local_file};
use super::boot;
use super::chunks::{Chunks, Held};
use super::lazy::cache_in;
use super::pull::client::{Access, of_registry};
use super::pull::job::{Job, Watcher};
use super::record::ImageRecord;
use super::{Found, Images, ROOT};
use crate::error::{Error, Result};
use crate::node::Node;
use crate::roots;
use crate::snapshots::disks;
use crate::snapshots::remote::{self, SnapshotArtifact};
use crate::snapshots::saved::Saved;
use jiffy_registry::artifact::{Artifact, FileToPush, IMAGE_TYPE, SNAPSHOT_TYPE};
use jiffy_registry::{Client, ClientOptions, Reference, RemoteArtifact, RemoteFile};
use jiffy_wire::api::{ArtifactKind, Image, PullStep, PushArtifact};
use jiffy_wire::disk::CONTENTS;
use jiffy_wire::pager::{Origin, RegistryOrigin};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use tracing::info;

impl Node {
    /// Pushes an image or a snapshot.
    pub fn push(self: &Arc<Node>, wanted: PushArtifact) -> Result<Watcher> {
        let registry = self.images().registry(wanted.access.registry.as_deref());
        let reference = super::name::reference(&wanted.reference, registry)?;
        if reference.digest().is_some() {
            return Err(Error::invalid(format!(
                "{reference} has a digest: what is pushed gets a tag, and its digest is what it is."
            ))
            .hint("Write HOST/REPOSITORY:TAG."));
        }
        let job = Job::new();
        let watcher = Job::watch(Arc::clone(&job))
            .ok_or_else(|| Error::internal("A push ended before it began."))?;
        let node = Arc::clone(self);
        tokio::spawn(async move {
            let pushed = node.push_now(&wanted, reference, &job).await;
            job.end(pushed);
        });
        Ok(watcher)
    }

    async fn push_now(
        self: &Arc<Node>,
        wanted: &PushArtifact,
        reference: Reference,
        job: &Arc<Job>,
    ) -> Result<PullStep> {
        let registry = wanted.access.registry.as_deref();
        let what = match wanted.kind {
            Some(ArtifactKind::Snapshot) => {
                What::Snapshot(Box::new(self.saved_snapshot(&wanted.name)?))
            }
            _ => match self.images().resolve(&wanted.name, registry).await {
                Ok(found) => What::Image(found),
                Err(error) => match self.saved_snapshot(&wanted.name) {
                    Ok(saved) => What::Snapshot(Box::new(saved)),
                    Err(_) => return Err(error),
                },
            },
        };
        let (node, wanted, job) = (Arc::clone(self), wanted.clone(), Arc::clone(job));
        tokio::task::spawn_blocking(move || match what {
            What::Image(found) => push_image(node.images(), &found, &wanted, &reference, &job),
            What::Snapshot(saved) => {
                push_snapshot(node.images(), &saved, &wanted, &reference, &job)
            }
        })
        .await
        .map_err(|error| Error::internal(format!("A push was cut short: {error}.")))?
    }
}

/// What is pushed.
enum What {
    Image(Found),
    Snapshot(Box<Saved>),
}

fn push_image(
    images: &Images,
    found: &Found,
    wanted: &PushArtifact,
    reference: &Reference,
    job: &Arc<Job>,
) -> Result<PullStep> {
    job.doing("cutting the image into chunks");
    let (record, _held) = images.with_chunks(&found.name)?;
    let artifact = ImageArtifact::of(&record);
    artifact.check()?;
    let scratch = &images.pulls.folder;
    let access = Access::new(&wanted.access, reference, scratch)?;
    let to = (&access.client, reference);
    let files = chunk_files(&images.chunks, &record.chunks, to, job)?;
    send(
        IMAGE_TYPE,
        artifact.blob()?,
        &files,
        &access.client,
        reference,
        images,
        job,
    )
}

fn push_snapshot(
    images: &Images,
    saved: &Saved,
    wanted: &PushArtifact,
    reference: &Reference,
    job: &Arc<Job>,
) -> Result<PullStep> {
    SnapshotArtifact::check(saved)?;
    job.doing("cutting the root file system into chunks");
    let (chunks, _held) = images.chunks_of_root(saved)?;
    let scratch = &images.pulls.folder;
    let draft = tempfile::Builder::new()
        .prefix(".push-")
        .tempdir_in(scratch)
        .map_err(|error| Error::io("write what is to be pushed", scratch, &error))?;
    let disk = match &saved.manifest.spec.root_disk {
        None => None,
        Some(kind) => {
            let disk = saved.volume(roots::NAME);
            Some(disks::cut_root(
                &disk,
                kind,
                &images.chunks,
                &chunks,
                draft.path(),
            )?)
        }
    };
    let (disk, disk_file) = disk.unzip();
    let mut volumes = Vec::new();
    let mut volume_files = Vec::new();
    for disk in &saved.manifest.spec.disks {
        job.doing(format!("cutting the volume {} into chunks", disk.name));
        let path = saved.volume(&disk.name);
        let cut = disks::cut_volume(&path, &disk.name, &images.chunks, draft.path());
        let (volume, file) = cut?;
        volumes.push(volume);
        volume_files.push(file);
    }
    let artifact = SnapshotArtifact::of(saved, chunks, disk, volumes)?;
    let access = Access::new(&wanted.access, reference, scratch)?;
    let mut files = remote::files(saved, draft.path())?;
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
        images,
        job,
    )
}

/// Hashes, sends what the registry lacks, and tags it: blocking.
pub(crate) fn send(
    artifact_type: &str,
    config: jiffy_registry::artifact::Config,
    files: &[FileToPush],
    client: &Client,
    reference: &Reference,
    images: &Images,
    job: &Arc<Job>,
) -> Result<PullStep> {
    let failed = |error| of_registry(&error, &images.pulls.folder);
    job.doing("looking at what there is to push");
    let annotations = BTreeMap::from([(
        "org.opencontainers.image.ref.name".to_owned(),
        reference.tag().unwrap_or_default().to_owned(),
    )]);
    let artifact =
        Artifact::plan(artifact_type, config, annotations, files, job.as_ref()).map_err(failed)?;
    job.doing(format!("pushing to {}", reference.registry()));
    let pushed = artifact
        .push(client, reference, job.as_ref())
        .map_err(failed)?;
    info!(%reference, digest = %pushed.digest, sent = pushed.bytes_uploaded, "pushed");
    Ok(PullStep::Pushed {
        manifest: pushed.digest.to_string(),
        sent: pushed.bytes_uploaded,
        had: pushed.bytes_total.saturating_sub(pushed.bytes_uploaded),
    })
}

/// The files of these images of chunks, to be pushed there: those that are here
/// from here, the others from the registry they came from.
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

/// A file where it came from: the first place that has it still.
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
            "Only parts of {name} are here, and nobody is known who has the rest."
        ))
    }))
}

/// A file of an artifact, if that has it: reached as it was when it was pulled, or
/// else, in the registry that is pushed to, as that is now.
fn file_at(
    origin: &RegistryOrigin,
    (client, to): (&Client, &Reference),
    job: &Arc<Job>,
) -> Result<Option<RemoteFile>> {
    let from = super::name::reference(&origin.reference, None)?;
    let config = origin.docker_config.as_deref();
    let noted = ClientOptions::noted(config, origin.plain_http, &origin.authorities);
    let opened = Client::new(noted)
        .and_then(|client| RemoteArtifact::open(&client, &from, job.as_ref()))
        .or_else(|error| match from.registry() == to.registry() {
            true => RemoteArtifact::open(client, &from, job.as_ref()),
            false => Err(error),
        });
    let artifact = opened.map_err(|error| of_registry(&error, Path::new(&origin.file)))?;
    Ok(artifact.file(&origin.file).cloned())
}

impl Images {
    /// The record of an image with its chunks, which are made if there are
    /// none, and are kept until the hold is dropped: blocking.
    pub(crate) fn with_chunks(&self, name: &str) -> Result<(ImageRecord, Held)> {
        let mut record = (*self.record(name)?).clone();
        let held = self.chunks.hold(&record.chunks);
        if !record.chunks.is_empty() && record.chunks.iter().all(|id| self.chunks.has(id)) {
            return Ok((record, held));
        }
        let above = match self.parent_of(&record)? {
            Some(parent) if parent != name => Some(self.with_chunks(&parent)?),
            _ => None,
        };
        let parent = above.iter().find_map(|(parent, _)| parent.chunks.first());
        let parent = parent.filter(|id| !self.chunks.is_partial(id));
        let folder = self.folder_of(name)?;
        let root = folder.join(ROOT);
        let boot = boot::load(&folder, &record.digest);
        let (made, held) = self.chunks.make(&root, parent.map(String::as_str), boot)?;
        record.chunks = made;
        self.keep_chunks(name, &record)?;
        Ok((record, held))
    }

    /// The image of chunks of a snapshot's root file system, and its parents, which are
    /// kept until the hold is dropped: blocking.
    fn chunks_of_root(&self, saved: &Saved) -> Result<(Vec<String>, Held)> {
        // Of one that was pulled there are chunks, here or elsewhere, and no file.
        if let Some(disk) = &saved.manifest.lazy_root {
            return Ok((disk.chunks.clone(), self.chunks.hold(&disk.chunks)));
        }
        match self.with_file(&saved.root())? {
            Some(name) => {
                let (record, held) = self.with_chunks(&name)?;
                Ok((record.chunks, held))
            }
            None => self.chunks.make(&saved.root(), None, None),
        }
    }

    /// Notes the chunks that were made of an image with it, unless another has
    /// its name by now: blocking.
    fn keep_chunks(&self, name: &str, made: &ImageRecord) -> Result<()> {
        let folder = self.folder_of(name)?;
        let _one = self.changing.blocking_lock();
        let now = ImageRecord::load(&folder).ok();
        let Some(mut now) = now.filter(|now| now.digest == made.digest) else {
            // Nobody knows of which of the two the chunks are.
            return Err(Error::conflict(format!(
                "The image {name} was replaced or removed while it was cut into chunks."
            ))
            .hint("Push it again."));
        };
        now.chunks.clone_from(&made.chunks);
        now.save(&folder)
            .map_err(|error| Error::io("write an image's record", &folder, &error))?;
        self.forget(&folder);
        Ok(())
    }

    /// The image whose file system is in this file: the same file, by another
    /// name. Digests would not do: that of an image that is not all here is what
    /// whoever pushed it says.
    fn with_file(&self, file: &Path) -> Result<Option<String>> {
        let number = |path: &Path| fs::metadata(path).ok().map(|it| (it.dev(), it.ino()));
        let Some(wanted) = number(file) else {
            return Ok(None);
        };
        let is_same = |image: &Image| {
            let lazy = || cache_in(&self.disks, image.chunks.as_slice()).join(CONTENTS);
            number(&image.file.clone().unwrap_or_else(lazy)) == Some(wanted)
        };
        let same = self.list()?.into_iter().find(is_same);
        Ok(same.map(|image| image.name))
    }

    /// The image that this one was made of, if it is here.
    fn parent_of(&self, record: &ImageRecord) -> Result<Option<String>> {
        let Some(parent) = &record.parent else {
            return Ok(None);
        };
        let images = self.list()?;
        let parent = images.into_iter().find(|image| image.digest == *parent);
        Ok(parent.map(|image| image.name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::images::tests::images;

    #[test]
    fn chunks_of_an_image_are_not_noted_with_the_one_that_took_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let (images, old) = images(folder.path());
        let web = images.folder_of("web").unwrap();
        let cut = ImageRecord {
            chunks: vec!["1".repeat(32)],
            ..old.clone()
        };
        let new = ImageRecord {
            digest: "2".repeat(64),
            ..old.clone()
        };
        new.save(&web).unwrap();
        let refused = images.keep_chunks("web", &cut).unwrap_err();
        assert!(refused.0.message.contains("web"), "{}", refused.0.message);
        assert_eq!(ImageRecord::load(&web).unwrap(), new);

        // The same file system with another configuration: that one stays.
        let again = ImageRecord {
            created: 7,
            ..old.clone()
        };
        again.save(&web).unwrap();
        images.keep_chunks("web", &cut).unwrap();
        let kept = ImageRecord::load(&web).unwrap();
        assert_eq!((kept.created, &kept.chunks), (7, &cut.chunks));
        fs::remove_dir_all(&web).unwrap();
        assert!(images.keep_chunks("web", &cut).is_err());
        assert!(!web.exists());
    }

    #[test]
    fn chunks_that_are_being_pushed_outlive_their_image() {
        let folder = tempfile::tempdir().unwrap();
        let (images, _) = images(folder.path());
        // Made for the first push, found by the second.
        for _ in 0..2 {
            let (record, held) = images.with_chunks("web").unwrap();
            let web = images.folder_of("web").unwrap();
            let aside = folder.path().join("aside");
            fs::rename(&web, &aside).unwrap();
            images.forget(&web);
            images.collect();
            assert!(images.chunks.has(&record.chunks[0]));
            fs::rename(&aside, &web).unwrap();
            drop(held);
        }
        fs::remove_dir_all(images.folder_of("web").unwrap()).unwrap();
        images.collect();
        assert!(images.chunks.held().is_empty());
        assert_eq!(
            fs::read_dir(folder.path().join("data/chunks"))
                .unwrap()
                .count(),
            0
        );
    }
}
