//! Images and snapshots to and from registries.
//!
//! A pull is a job: a second request for the same pull watches the first one's job. The job is
//! cancelled when nobody watches it any more. Blobs are kept in `pulls/DIGEST/` until the image
//! is made, so that the next attempt continues where this one was interrupted, even by the end of
//! the daemon.
//!
//! * [`job`]: pulls in progress, and their watchers.
//! * [`client`]: access to a registry.
//! * [`keep`]: saved credentials and authorities.
//! * [`fetch`]: the blocking part of a pull.
//! * `lazy`: the blocking part of a pull of Jiffy's artifacts.
//! * [`made`]: what these parts have made, before it has a name.
//! * [`push`]: the blocking part of a push.
//! * [`pull_limits`]: limits of simultaneous pulls.

pub mod client;
pub mod fetch;
pub mod job;
pub mod keep;
mod lazy;
pub mod made;
pub mod pull_limits;
pub mod push;

use jiffy_sys::mutex::lock;
use job::{Job, Watcher};
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, SystemTime};
use tracing::{info, warn};

/// How long the blobs of an unfinished pull are kept.
const KEEP_TIME: Duration = Duration::from_secs(7 * 24 * 3600);

/// Pulls in progress, and the blobs of unfinished ones.
#[derive(Debug)]
pub struct Transfers {
    /// Folder of blobs and of temporary files.
    pub(crate) folder: PathBuf,
    jobs: Mutex<HashMap<String, Weak<Job>>>,
    pull_limits: pull_limits::PullLimits,
}

/// Begins the refusal of a pull without room.
const PULL_NEEDS: &str = "The pull needs at least";

impl Transfers {
    /// Removes blobs of pulls that were not resumed in time, and temporary files of an earlier
    /// daemon.
    pub fn new(folder: PathBuf) -> Transfers {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().starts_with('.') {
                // The temporary files of a push are in a folder.
                let path = entry.path();
                let _ = fs::remove_dir_all(&path).or_else(|_| fs::remove_file(&path));
                continue;
            }
            let touched = entry.metadata().and_then(|data| data.modified());
            let old = touched.is_ok_and(|touched| {
                let since = SystemTime::now().duration_since(touched);
                since.is_ok_and(|since| since > KEEP_TIME)
            });
            if old {
                info!(path = %entry.path().display(), "removing the blobs of an old pull");
                let _ = fs::remove_dir_all(entry.path());
            }
        }
        Transfers {
            folder,
            jobs: Mutex::default(),
            pull_limits: pull_limits::PullLimits::default(),
        }
    }

    /// Waits until one more pull from this registry may begin.
    pub async fn pull_slot(&self, registry: &str) -> Option<pull_limits::PullSlot> {
        self.pull_limits.acquire(registry).await
    }

    /// The folder of the blobs of a pull, by the digest of its manifest.
    fn blobs(&self, digest: &jiffy_registry::Digest) -> PathBuf {
        self.folder.join(digest.hex())
    }

    /// Watches the job with this key; a new job and `true` if there is none. With `renews` the job
    /// asks the registry even if the image is here.
    pub fn join(&self, key: &str, renews: bool) -> (Watcher, bool) {
        let mut jobs = lock(&self.jobs);
        jobs.retain(|_, job| job.strong_count() > 0);
        let job = jobs.get(key).and_then(Weak::upgrade);
        if let Some(watcher) = job.and_then(|job| Job::watch_for(job, renews)) {
            return (watcher, false);
        }
        let job = Job::new();
        jobs.insert(key.to_owned(), Arc::downgrade(&job));
        let watcher = Job::watch_for(job, renews).expect("a new job has not ended");
        (watcher, true)
    }
}

/// Removes the blobs of a finished pull; a failure is only logged.
fn remove_blobs(folder: &Path) {
    if let Err(error) = fs::remove_dir_all(folder)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        warn!(folder = %folder.display(), %error, "blobs that are not needed any more could not be removed");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_daemon_removes_temporary_files_and_keeps_blobs() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        for name in [".push-abc", "0123"] {
            fs::create_dir(path(name)).unwrap();
            fs::write(path(name).join("ram.image"), "ram").unwrap();
        }
        fs::write(path(".authorities"), "pem").unwrap();
        let transfers = Transfers::new(folder.path().to_owned());
        let left = fs::read_dir(&transfers.folder).unwrap().flatten();
        let left: Vec<_> = left.map(|entry| entry.file_name()).collect();
        assert_eq!(left, ["0123"]);
    }
}
