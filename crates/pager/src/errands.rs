//! What may have to wait for others: fetching from origins, filling the caches
//! of disks. Threads of their own, so that a registry that answers slowly holds
//! up no page fault.
//!
//! What somebody waits for goes first, and work ahead of need never takes more
//! than half of the threads.

use jiffy_store::Decoder;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

/// Threads, at most. They wait more than they work.
const THREADS: usize = 8;

/// Buffers of one thread.
#[derive(Default)]
pub struct Hands {
    /// Unpacks chunks.
    pub decoder: Decoder,
    /// For chunks.
    pub chunks: Vec<u8>,
}

type Errand = Box<dyn FnOnce(&mut Hands) + Send>;

/// How soon it is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Urgency {
    /// Somebody waits for it.
    Now,
    /// Somebody may need it.
    Ahead,
}

/// The threads. They are started when they are needed. Dropping it ends them
/// after what is under way, which nobody waits for: an origin may be slow.
#[derive(Default)]
pub struct Errands {
    shared: Arc<Shared>,
    threads: Mutex<usize>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    now: VecDeque<Errand>,
    ahead: VecDeque<Errand>,
    /// Threads that wait for something to do.
    idle: usize,
    /// Threads that work ahead.
    working_ahead: usize,
    stop: bool,
}

impl Errands {
    /// Has something done.
    pub fn push(&self, urgency: Urgency, errand: impl FnOnce(&mut Hands) + Send + 'static) {
        let mut state = lock(&self.shared.state);
        match urgency {
            Urgency::Now => state.now.push_back(Box::new(errand)),
            Urgency::Ahead => state.ahead.push_back(Box::new(errand)),
        }
        let enough = state.idle >= state.now.len() + state.ahead.len();
        drop(state);
        self.shared.changed.notify_one();
        if !enough {
            self.hire();
        }
    }

    fn hire(&self) {
        let mut threads = lock(&self.threads);
        if *threads == THREADS {
            return;
        }
        let shared = self.shared.clone();
        let thread = thread::Builder::new()
            .name(format!("errand-{threads}"))
            .spawn(move || shared.run());
        match thread {
            Ok(_) => *threads += 1,
            // Those that are there do it, if there are any.
            Err(error) => tracing::error!(%error, "a thread for errands cannot be started"),
        }
    }
}

impl Drop for Errands {
    fn drop(&mut self) {
        lock(&self.shared.state).stop = true;
        self.shared.changed.notify_all();
    }
}

impl Shared {
    fn run(&self) {
        let mut hands = Hands::default();
        let mut state = lock(&self.state);
        while !state.stop {
            if let Some(errand) = state.now.pop_front() {
                drop(state);
                errand(&mut hands);
                state = lock(&self.state);
            } else if state.working_ahead < THREADS / 2
                && let Some(errand) = state.ahead.pop_front()
            {
                state.working_ahead += 1;
                drop(state);
                errand(&mut hands);
                state = lock(&self.state);
                state.working_ahead -= 1;
                // One that was let wait may go now.
                self.changed.notify_one();
            } else {
                state.idle += 1;
                state = self
                    .changed
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
                state.idle -= 1;
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{self, channel};
    use std::time::Duration;

    const PATIENCE: Duration = Duration::from_secs(60);

    #[test]
    fn what_is_waited_for_passes_any_amount_of_work_ahead() {
        let errands = Errands::default();
        let (release, held) = channel::<()>();
        let held = Arc::new(Mutex::new(held));
        let (say, heard) = channel();
        for number in 0..50 {
            let (held, say) = (held.clone(), say.clone());
            errands.push(Urgency::Ahead, move |_| {
                let _ = held.lock().unwrap().recv();
                say.send(number).unwrap();
            });
        }
        // All work ahead is stuck; this is done nevertheless.
        for number in 100..150 {
            let say = say.clone();
            errands.push(Urgency::Now, move |_| say.send(number).unwrap());
        }
        let mut done: Vec<i32> = (0..50)
            .map(|_| heard.recv_timeout(PATIENCE).unwrap())
            .collect();
        done.sort();
        assert_eq!(done, (100..150).collect::<Vec<_>>());
        assert!(matches!(heard.try_recv(), Err(mpsc::TryRecvError::Empty)));
        drop(release);
        let mut done: Vec<i32> = (0..50)
            .map(|_| heard.recv_timeout(PATIENCE).unwrap())
            .collect();
        done.sort();
        assert_eq!(done, (0..50).collect::<Vec<_>>());
        assert!(*lock(&errands.threads) <= THREADS);
    }
}
