//! An operation with many concurrent callers that runs once for all of them.

use jiffy_sys::mutex::lock;
use std::fmt::Debug;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use tokio::sync::watch;
use tokio::time::Instant;

/// Runs an operation once for all callers that come meanwhile.
#[derive(Debug)]
pub struct SingleFlight<T>(Mutex<Option<Current<T>>>);

/// The result, and when it was ready.
type Outcome<T> = watch::Receiver<Option<(Instant, T)>>;

/// A caller's share of an operation.
#[derive(Debug)]
#[must_use = "the operation is given up when no caller waits for it any more"]
pub struct Joined<T> {
    /// Whether this caller began the operation.
    pub began: bool,
    result: Outcome<T>,
    /// Nothing for the result of an operation that is over.
    _wanted: Option<Arc<watch::Sender<()>>>,
}

impl<T: Clone> Joined<T> {
    /// Waits for the result. `None` if the operation panicked.
    pub async fn result(mut self) -> Option<T> {
        let done = self.result.wait_for(Option::is_some).await.ok()?.clone();
        done.map(|(_, result)| result)
    }
}

/// The operation in progress, or the last one.
#[derive(Debug)]
struct Current<T> {
    result: Outcome<T>,
    /// Held by all waiting callers.
    wanted: Weak<watch::Sender<()>>,
}

impl<T> Default for SingleFlight<T> {
    fn default() -> SingleFlight<T> {
        SingleFlight(Mutex::default())
    }
}

impl<T: Clone + Debug + Send + Sync + 'static> SingleFlight<T> {
    /// Joins the operation in progress, or else the last one if `suffices` accepts its result and when
    /// that was ready; or else begins one. The receiver given to `begin` is closed when no caller waits
    /// any more.
    pub fn join<F>(
        &self,
        suffices: impl FnOnce(Instant, &T) -> bool,
        begin: impl FnOnce(watch::Receiver<()>) -> F,
    ) -> Joined<T>
    where
        F: Future<Output = T> + Send + 'static,
    {
        let mut current = self.lock();
        if let Some(last) = &*current
            && let Some(joined) = last.in_progress().or_else(|| last.done(suffices))
        {
            return joined;
        }
        let (wanted, is_wanted) = watch::channel(());
        let wanted = Arc::new(wanted);
        let (tell, result) = watch::channel(None);
        let operation = begin(is_wanted.clone());
        tokio::spawn(async move {
            let done = operation.await;
            // Without callers the result may only say that the operation was given up.
            if is_wanted.has_changed().is_ok() {
                tell.send_replace(Some((Instant::now(), done)));
            }
        });
        *current = Some(Current {
            result: result.clone(),
            wanted: Arc::downgrade(&wanted),
        });
        Joined {
            began: true,
            result,
            _wanted: Some(wanted),
        }
    }

    /// Is the operation in progress, with a caller waiting for it?
    pub fn is_in_progress(&self) -> bool {
        self.lock()
            .as_ref()
            .and_then(Current::in_progress)
            .is_some()
    }

    /// The last result and when it was ready, if the operation is over and a caller waited for it.
    pub fn last(&self) -> Option<(Instant, T)> {
        self.lock().as_ref()?.result.borrow().clone()
    }

    /// Forgets the last result.
    pub fn forget(&self) {
        self.lock()
            .take_if(|current| current.in_progress().is_none());
    }

    fn lock(&self) -> MutexGuard<'_, Option<Current<T>>> {
        lock(&self.0)
    }
}

impl<T> Current<T> {
    fn in_progress(&self) -> Option<Joined<T>> {
        // The operation's task drops the sender when it ends.
        self.result.has_changed().ok()?;
        Some(Joined {
            began: false,
            result: self.result.clone(),
            _wanted: Some(self.wanted.upgrade()?),
        })
    }

    /// The operation, if it is over and its result is accepted.
    fn done(&self, suffices: impl FnOnce(Instant, &T) -> bool) -> Option<Joined<T>> {
        let done = self.result.borrow();
        let (at, result) = done.as_ref()?;
        suffices(*at, result).then(|| Joined {
            began: false,
            result: self.result.clone(),
            _wanted: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};
    use tokio::sync::Notify;

    #[tokio::test]
    async fn ten_thousand_callers_share_one_run() {
        let flight = Arc::new(SingleFlight::<u32>::default());
        let (count, go) = (Arc::new(AtomicU32::new(0)), Arc::new(Notify::new()));
        let want = |flight: Arc<SingleFlight<u32>>| {
            let (count, go) = (Arc::clone(&count), Arc::clone(&go));
            async move {
                let begin = |_| async move {
                    go.notified().await;
                    count.fetch_add(1, Ordering::SeqCst) + 1
                };
                flight.join(|_, _| false, begin).result().await
            }
        };
        for round in 1..4 {
            let waiting: Vec<_> = (0..10_000)
                .map(|_| tokio::spawn(want(Arc::clone(&flight))))
                .collect();
            tokio::task::yield_now().await;
            go.notify_one();
            for one in waiting {
                assert_eq!(one.await.unwrap(), Some(round));
            }
            assert_eq!(flight.last().unwrap().1, round);
        }
        flight.forget();
        assert!(flight.last().is_none());
    }

    #[tokio::test]
    async fn the_work_notices_when_its_last_caller_leaves() {
        let flight = Arc::new(SingleFlight::<()>::default());
        let (gone, told) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let want = || {
            let (flight, gone, told) = (Arc::clone(&flight), Arc::clone(&gone), Arc::clone(&told));
            tokio::spawn(async move {
                let begin = |mut wanted: watch::Receiver<()>| async move {
                    gone.notify_one();
                    assert!(wanted.changed().await.is_err());
                    told.notify_one();
                };
                flight.join(|_, _| false, begin).result().await
            })
        };
        let first = want();
        gone.notified().await;
        let second = want();
        tokio::task::yield_now().await;
        first.abort();
        tokio::task::yield_now().await;
        second.abort();
        told.notified().await;
        tokio::task::yield_now().await;
        assert!(flight.last().is_none());
    }

    #[tokio::test]
    async fn after_a_panic_the_next_caller_starts_again() {
        let flight = SingleFlight::<u32>::default();
        let panics = |_| async { panic!("as it must") };
        assert_eq!(flight.join(|_, _| false, panics).result().await, None);
        let next = flight.join(|_, _| true, |_| async { 2 });
        assert!(next.began && !flight.join(|_, _| false, |_| async { 3 }).began);
        assert_eq!(next.result().await, Some(2));
    }

    #[tokio::test]
    async fn a_last_result_that_suffices_is_used() {
        let flight = SingleFlight::<u32>::default();
        let before = Instant::now();
        let first = flight.join(|_, _| true, |_| async { 1 });
        assert_eq!(first.result().await, Some(1));
        tokio::task::yield_now().await;
        let again = flight.join(|at, &result| at >= before && result == 1, |_| async { 2 });
        assert!(!again.began);
        assert_eq!(again.result().await, Some(1));
        let next = flight.join(|_, &result| result == 2, |_| async { 2 });
        assert!(next.began);
        assert_eq!(next.result().await, Some(2));
    }
}
