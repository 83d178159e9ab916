//! Jobs: pulls in progress, and their watchers.

use crate::error::Result;
use crate::room::disk::Unwritten;
use jiffy_registry::{Descriptor, Progress};
use jiffy_sys::mutex::lock;
use jiffy_wire::api::PullStep;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::watch;

/// Least time between two reports of bytes to a watcher.
const REPORT_INTERVAL: Duration = Duration::from_millis(100);

/// A long operation. It is cancelled when its last watcher leaves.
#[derive(Debug)]
pub struct Job {
    state: Mutex<State>,
    /// Counts changes, to wake watchers.
    changed: watch::Sender<u64>,
    watchers: AtomicUsize,
    cancelled: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    step: String,
    /// Digest, bytes done and total bytes, in order of appearance.
    blobs: Vec<(String, u64, u64)>,
    places: HashMap<String, usize>,
    /// A watcher wants what the registry has now, not what is here.
    renews: bool,
    /// How it ended.
    end: Option<PullStep>,
}

impl Job {
    /// A new job without watchers.
    pub fn new() -> Arc<Job> {
        Arc::new(Job {
            state: Mutex::default(),
            changed: watch::Sender::new(0),
            watchers: AtomicUsize::new(0),
            cancelled: AtomicBool::new(false),
        })
    }

    /// Adds a watcher; `None` if the job was cancelled or has ended.
    pub fn watch(job: Arc<Job>) -> Option<Watcher> {
        Job::watch_for(job, false)
    }

    /// As [`Job::watch`]; with `renews` the watcher wants what the registry has now.
    pub fn watch_for(job: Arc<Job>, renews: bool) -> Option<Watcher> {
        {
            let mut state = job.lock();
            // The last watcher cancels the job while it holds this lock.
            if state.end.is_some() || job.cancelled.load(Ordering::Acquire) {
                return None;
            }
            state.renews |= renews;
            job.watchers.fetch_add(1, Ordering::AcqRel);
        }
        let changes = job.changed.subscribe();
        Some(Watcher {
            job,
            changes,
            step: String::new(),
            told: HashMap::new(),
            over: false,
            first: true,
        })
    }

    /// Sets the description of the current step, a few words.
    pub fn set_step(&self, what: impl Into<String>) {
        self.lock().step = what.into();
        self.note();
    }

    /// Whether a watcher wants what the registry has now.
    pub fn renews(&self) -> bool {
        self.lock().renews
    }

    /// Ends the job with this result.
    pub fn end(&self, result: Result<PullStep>) {
        self.end_of(result, true);
    }

    /// Ends the job with the result of a pull that began with this [`Job::renews`]; false if a
    /// watcher that came since wants more than such a pull, which has to be done again.
    pub fn end_of(&self, result: Result<PullStep>, renews: bool) -> bool {
        let mut state = self.lock();
        if state.renews && !renews {
            return false;
        }
        state.end = Some(result.unwrap_or_else(|error| PullStep::Failed(error.0)));
        drop(state);
        self.note();
        true
    }

    /// Whether it was cancelled, because nobody watches it any more.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    /// Reports progress in bytes of a blob, or of a step with a name of its own.
    pub fn moved(&self, digest: &str, done: u64, total: u64) {
        let mut state = self.lock();
        match state.places.get(digest).copied() {
            Some(place) => state.blobs[place] = (digest.to_owned(), done, total),
            None => {
                let place = state.blobs.len();
                state.places.insert(digest.to_owned(), place);
                state.blobs.push((digest.to_owned(), done, total));
            }
        }
        drop(state);
        self.note();
    }

    fn note(&self) {
        self.changed
            .send_modify(|count| *count = count.wrapping_add(1));
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl Job {
    /// Bytes done of a blob.
    fn done(&self, digest: &str) -> u64 {
        let state = self.lock();
        let place = state.places.get(digest);
        place.map_or(0, |place| state.blobs[*place].1)
    }
}

/// What a pull will write.
#[derive(Debug)]
pub(super) struct ToFetch {
    /// Digests and bytes of the blobs.
    blobs: Vec<(String, u64)>,
    /// Bytes of what is made from them.
    more: u64,
    job: Arc<Job>,
}

impl ToFetch {
    /// These blobs, and `more` bytes.
    pub(super) fn new<'a>(
        blobs: impl Iterator<Item = &'a Descriptor>,
        more: u64,
        job: &Arc<Job>,
    ) -> Arc<ToFetch> {
        Arc::new(ToFetch {
            blobs: blobs
                .map(|blob| (blob.digest.to_string(), blob.size))
                .collect(),
            more,
            job: Arc::clone(job),
        })
    }
}

impl Unwritten for ToFetch {
    fn unwritten(&self) -> u64 {
        let left = self.blobs.iter().map(|(digest, bytes)| {
            let done = self.job.done(digest);
            bytes.saturating_sub(done)
        });
        left.fold(self.more, u64::saturating_add)
    }
}

impl Progress for Job {
    fn moved(&self, blob: &Descriptor, done: u64) {
        Job::moved(self, &blob.digest.to_string(), done, blob.size);
    }

    fn retrying(&self, why: &str, wait: Duration) {
        self.set_step(format!(
            "trying again in {:.1} s: {why}",
            wait.as_secs_f64()
        ));
    }

    fn cancelled(&self) -> bool {
        self.is_cancelled()
    }
}

/// A watcher of a job.
#[derive(Debug)]
pub struct Watcher {
    job: Arc<Job>,
    changes: watch::Receiver<u64>,
    step: String,
    told: HashMap<String, u64>,
    over: bool,
    first: bool,
}

impl Watcher {
    /// The job that it watches.
    pub fn job(&self) -> Arc<Job> {
        Arc::clone(&self.job)
    }

    /// The next changes, rate-limited; empty once the end was reported.
    pub async fn next(&mut self) -> Vec<PullStep> {
        loop {
            if self.over {
                return Vec::new();
            }
            if !self.first {
                // Can't fail: the watcher keeps the job, and so the sender, alive.
                let _ = self.changes.changed().await;
                if self.job.lock().end.is_none() {
                    tokio::time::sleep(REPORT_INTERVAL).await;
                }
            }
            self.first = false;
            self.changes.mark_unchanged();
            let steps = self.new_steps();
            if !steps.is_empty() {
                return steps;
            }
        }
    }

    fn new_steps(&mut self) -> Vec<PullStep> {
        let state = self.job.lock();
        let mut steps = Vec::new();
        if state.step != self.step {
            self.step.clone_from(&state.step);
            steps.push(PullStep::Doing(state.step.clone()));
        }
        for (digest, done, total) in &state.blobs {
            if self.told.get(digest) != Some(done) {
                self.told.insert(digest.clone(), *done);
                steps.push(PullStep::Blob {
                    digest: digest.clone(),
                    done: *done,
                    total: *total,
                });
            }
        }
        if let Some(end) = &state.end {
            self.over = true;
            steps.push(end.clone());
        }
        steps
    }

    /// Waits for the end.
    ///
    /// # Errors
    ///
    /// If the job failed: its error.
    #[cfg(test)]
    pub async fn end(mut self) -> Result<PullStep> {
        loop {
            for step in self.next().await {
                match step {
                    PullStep::Failed(error) => return Err(crate::error::Error(error)),
                    PullStep::Doing(_) | PullStep::Blob { .. } => {}
                    end => return Ok(end),
                }
            }
        }
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        let _state = self.job.lock();
        if self.job.watchers.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.job.cancelled.store(true, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[tokio::test]
    async fn every_watcher_gets_all_news_and_the_last_to_leave_cancels() {
        let job = Job::new();
        let mut one = Job::watch(Arc::clone(&job)).unwrap();
        job.set_step("fetching");
        Job::moved(&job, "sha256:a", 1, 10);
        let steps = one.next().await;
        assert_eq!(steps.len(), 2);
        let two = Job::watch(Arc::clone(&job)).unwrap();
        drop(one);
        assert!(!job.is_cancelled());
        Job::moved(&job, "sha256:a", 10, 10);
        job.end(Ok(PullStep::Pushed {
            manifest: "m".into(),
            sent: 1,
            had: 2,
        }));
        assert!(matches!(
            two.end().await,
            Ok(PullStep::Pushed { sent: 1, .. })
        ));
        assert!(job.is_cancelled());
        assert!(Job::watch(job).is_none());
        let failed = Job::new();
        let watcher = Job::watch(Arc::clone(&failed)).unwrap();
        failed.end(Err(Error::not_found("gone")));
        assert_eq!(watcher.end().await.unwrap_err().0.message, "gone");
    }

    #[tokio::test]
    async fn a_watcher_that_renews_gets_no_result_of_a_pull_that_did_not() {
        let result = |sent| {
            Ok(PullStep::Pushed {
                manifest: "m".into(),
                sent,
                had: 0,
            })
        };
        let job = Job::new();
        let first = Job::watch_for(Arc::clone(&job), false).unwrap();
        assert!(!job.renews());
        let second = Job::watch_for(Arc::clone(&job), true).unwrap();
        assert!(!job.end_of(result(1), false));
        assert!(job.renews());
        assert!(job.end_of(result(2), true));
        for watcher in [first, second] {
            let end = watcher.end().await.unwrap();
            assert!(matches!(end, PullStep::Pushed { sent: 2, .. }), "{end:?}");
        }
        let alone = Job::new();
        let _watcher = Job::watch_for(Arc::clone(&alone), false).unwrap();
        assert!(alone.end_of(result(3), false));
        assert!(Job::watch_for(alone, true).is_none(), "it has ended");
    }
}
