//! Pulls and pushes: checks what is here, asks the registry, and names the result.

use super::Node;
use jiffy_content::error::{Error, Result};
use jiffy_content::images::{Found as FoundImage, name};
use jiffy_content::leases::Lease;
use jiffy_content::snapshots::saved::Saved;
use jiffy_content::transfer::fetch::{Existing, fetch};
use jiffy_content::transfer::job::{Job, Watcher};
use jiffy_content::transfer::made::Found;
use jiffy_content::transfer::{client, push};
use jiffy_registry::{Platform, Reference};
use jiffy_wire::api::{
    Action, ArtifactKind, ErrorKind, ImageSource, PullImage, PullStep, PushArtifact,
};
use std::sync::Arc;
use tracing::info;

impl Node {
    /// Pulls an image, or watches a pull of it that is in progress.
    ///
    /// # Errors
    ///
    /// If the reference, the platform or the access is not valid. How the pull ends is told by the
    /// [`Watcher`].
    pub fn pull(self: &Arc<Node>, wanted: PullImage) -> Result<Watcher> {
        let registry = self.images.registry(wanted.access.registry.as_deref());
        let reference = name::reference(&wanted.reference, registry)?;
        let platform = client::platform(wanted.platform.as_deref())?;
        let key = format!("{reference} {platform} {}", client::key(&wanted.access)?);
        // An image that is here may be of another platform than the one that is asked for.
        let renews = wanted.renew || wanted.platform.is_some();
        let (watcher, new) = self.transfers.join(&key, renews);
        if new {
            let (node, job) = (Arc::clone(self), watcher.job());
            tokio::spawn(async move {
                loop {
                    let wanted = PullImage {
                        renew: job.renews(),
                        ..wanted.clone()
                    };
                    let (reference, platform) = (reference.clone(), platform.clone());
                    let pulled = pull(&node, &wanted, reference, platform, &job).await;
                    if job.end_of(pulled, wanted.renew) {
                        break;
                    }
                }
            });
        }
        Ok(watcher)
    }
}

/// Pulls one image.
async fn pull(
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

/// One attempt of [`pull`]; `None` if the image here was removed while the registry was asked
/// whether it is up to date.
async fn try_pull(
    node: &Arc<Node>,
    wanted: &PullImage,
    reference: Reference,
    platform: Platform,
    job: &Arc<Job>,
) -> Result<Option<PullStep>> {
    let images = &node.images;
    let name = reference.to_string();
    let have = images.find(&name).await.ok();
    // An earlier pull may not have verified the signatures that are required now.
    let policy = images.policy();
    let verify = |source: Option<&ImageSource>| {
        wanted.access.verify_key.is_some() || policy.check("image", &name, source).is_err()
    };
    let keeps = have.is_some() && !wanted.renew;
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
    job.set_step(format!(
        "waiting for other pulls from {}",
        reference.registry()
    ));
    let slot = node.transfers.pull_slot(reference.registry()).await;
    job.set_step(format!("asking {}", reference.registry()));
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
        let have = Existing {
            manifest: manifest.clone(),
            memory,
            keep: keeps,
        };
        let (images, transfers) = (&node_too.images, &node_too.transfers);
        let found = fetch(
            images, transfers, &wanted, &reference, &platform, have, &job_too,
        );
        drop(slot);
        if let (Ok(Found::UpToDate(signed_by)), Some(manifest)) = (&found, &manifest) {
            node_too.note_signed(&reference.to_string(), manifest, signed_by)?;
        }
        found
    });
    let made = made
        .await
        .map_err(|error| Error::internal(format!("A pull did not finish: {error}.")))??;
    keep(node, &name, made).await
}

/// Gives what a pull has made its name; `None` if the image here was removed meanwhile.
async fn keep(node: &Arc<Node>, name: &str, made: Found) -> Result<Option<PullStep>> {
    let images = &node.images;
    let made = match made {
        Found::UpToDate(_) => {
            if let Some((snapshot, _)) = node.pulled_snapshot(name) {
                node.renew_snapshot_origins(name).await;
                let fetched = 0;
                return Ok(Some(PullStep::PulledSnapshot { snapshot, fetched }));
            }
            let found = match images.find(name).await {
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
            let kept = node.keep_snapshot(name, made.draft, &made.manifest);
            let snapshot = kept.await?;
            return Ok(Some(PullStep::PulledSnapshot { snapshot, fetched }));
        }
    };
    images.complete(&made.folder, &made.record)?;
    node.release_image(name).await;
    images
        .publish(name, made.folder, || node.check_image_unused(name))
        .await?;
    node.image_changed(name, Action::Created);
    info!(
        image = name,
        digest = made.record.digest,
        fetched = made.fetched,
        "image pulled"
    );
    let found = images.find(name).await?;
    if let Some(disk) = &found.root.lazy {
        // VMs may use the same disk under another image's name.
        node.renew_origins(disk).await;
    }
    let image = images.shown(&found)?;
    let fetched = made.fetched;
    Ok(Some(PullStep::Pulled { image, fetched }))
}

impl Node {
    /// Pushes an image or a snapshot.
    ///
    /// # Errors
    ///
    /// If the reference is not valid or has a digest. How the push ends is told by the [`Watcher`].
    pub fn push(self: &Arc<Node>, wanted: PushArtifact) -> Result<Watcher> {
        let registry = self.images.registry(wanted.access.registry.as_deref());
        let reference = name::reference(&wanted.reference, registry)?;
        if reference.digest().is_some() {
            return Err(
                Error::invalid(format!("{reference} has a digest: a push needs a tag."))
                    .hint("Write HOST/REPOSITORY:TAG."),
            );
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
            Some(ArtifactKind::Snapshot) => self.snapshot_to_push(&wanted.name)?,
            _ => match self.images.resolve(&wanted.name, registry).await {
                Ok(found) => What::Image(found),
                Err(error) => match self.snapshot_to_push(&wanted.name) {
                    Ok(what) => what,
                    Err(busy) if busy.0.kind == ErrorKind::Conflict => return Err(busy),
                    Err(_) => return Err(error),
                },
            },
        };
        let (node, wanted, job) = (Arc::clone(self), wanted.clone(), Arc::clone(job));
        tokio::task::spawn_blocking(move || match what {
            What::Image(found) => {
                let transfers = &node.transfers;
                push::image(&node.images, transfers, &found, &wanted, &reference, &job)
            }
            What::Snapshot(saved, _lease) => {
                let transfers = &node.transfers;
                push::snapshot(&node.images, transfers, &saved, &wanted, &reference, &job)
            }
        })
        .await
        .map_err(|error| Error::internal(format!("A push did not finish: {error}.")))?
    }

    /// A snapshot, held while it is pushed: a push may take long, and reads its files one by one.
    fn snapshot_to_push(&self, name: &str) -> Result<What> {
        let lease = self.snapshots.lease_for_push(name)?;
        let saved = self.saved_snapshot(name)?;
        Ok(What::Snapshot(Box::new(saved), lease))
    }
}

/// What is being pushed.
enum What {
    Image(FoundImage),
    Snapshot(Box<Saved>, Lease),
}
