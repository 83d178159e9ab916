//! Threads for work that may block: fetching from origins, filling disk caches. So a slow registry
//! does not delay page faults of other VMs.
//!
//! Each task has a *lane*, named by the registries that it may wait for. A slow registry occupies
//! only the threads of its lane: a lane with no task running always gets a thread, however many
//! other lanes have.
//!
//! Tasks with a waiter run first, and prefetching never takes more than half of a lane's threads.

use crate::scratch::Scratch;
use jiffy_store::Stop;
use jiffy_sys::mutex::{lock, unpoisoned};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

/// Most threads for one lane: as many as one VMM has disk requests in flight. The threads mostly
/// wait for the network.
const LANE_THREADS: usize = 16;
/// Number of busy threads above which a lane gets no second one.
const BUSY_THREADS: usize = 32;
/// Threads, at most.
const MAX_THREADS: usize = 64;

/// A task; it gets the buffers of its thread.
type Task = Box<dyn FnOnce(&mut Scratch) + Send>;

/// How urgent a task is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Urgency {
    /// Somebody waits for it.
    Now,
    /// Somebody may need it.
    Ahead,
}

/// The pool. Threads are started on demand. Dropping it ends them after their current tasks,
/// without waiting for those: an origin may be slow.
#[derive(Default)]
pub struct IoPool {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    lanes: BTreeMap<String, Lane>,
    threads: usize,
    /// Threads that are running a task.
    working: usize,
    stop: bool,
}

#[derive(Default)]
struct Lane {
    now: VecDeque<Task>,
    ahead: VecDeque<Task>,
    working: usize,
    working_ahead: usize,
}

impl Lane {
    /// The urgency of the lane's next task, if one may begin.
    fn next(&self, working: usize) -> Option<Urgency> {
        let most = if working < BUSY_THREADS {
            LANE_THREADS
        } else {
            1
        };
        if self.working >= most {
            None
        } else if !self.now.is_empty() {
            Some(Urgency::Now)
        } else {
            let may = !self.ahead.is_empty() && self.working_ahead < LANE_THREADS / 2;
            may.then_some(Urgency::Ahead)
        }
    }

    /// How many more threads the lane could use.
    fn wanted_threads(&self, working: usize) -> usize {
        let most = if working < BUSY_THREADS {
            LANE_THREADS
        } else {
            1
        };
        let ahead = self.ahead.len().min(LANE_THREADS / 2);
        (self.now.len() + ahead).min(most.saturating_sub(self.working))
    }
}

impl IoPool {
    /// Queues a task that may wait for the registries that `lane` names.
    pub fn push(
        &self,
        urgency: Urgency,
        lane: String,
        task: impl FnOnce(&mut Scratch) + Send + 'static,
    ) {
        let mut state = lock(&self.shared.state);
        let queues = state.lanes.entry(lane).or_default();
        match urgency {
            Urgency::Now => queues.now.push_back(Box::new(task)),
            Urgency::Ahead => queues.ahead.push_back(Box::new(task)),
        }
        let lanes = state.lanes.values();
        let wanted: usize = lanes.map(|lane| lane.wanted_threads(state.working)).sum();
        // Threads that are idle or being started.
        let spare = state.threads - state.working;
        if spare < wanted && state.threads < MAX_THREADS {
            self.start_thread(&mut state);
        }
        drop(state);
        self.shared.changed.notify_one();
    }

    fn start_thread(&self, state: &mut State) {
        let shared = self.shared.clone();
        let thread = thread::Builder::new()
            .name(format!("task-{}", state.threads))
            .spawn(move || shared.run());
        match thread {
            Ok(_) => state.threads += 1,
            // The threads that exist do the task, if there are any.
            Err(error) => tracing::error!(%error, "a thread of the I/O pool cannot be started"),
        }
    }
}

impl Drop for IoPool {
    fn drop(&mut self) {
        lock(&self.shared.state).stop = true;
        self.shared.changed.notify_all();
    }
}

impl State {
    /// The next task and its lane: urgent tasks first, and among them the lane with the fewest
    /// threads.
    fn take(&mut self) -> Option<(String, Urgency, Task)> {
        let working = self.working;
        let ready = self.lanes.iter_mut().filter_map(|(name, lane)| {
            let urgency = lane.next(working)?;
            Some((urgency == Urgency::Ahead, lane.working, name, lane))
        });
        let (is_ahead, _, name, lane) =
            ready.min_by_key(|(is_ahead, busy, ..)| (*is_ahead, *busy))?;
        let (urgency, task) = match is_ahead {
            false => (Urgency::Now, lane.now.pop_front()?),
            true => (Urgency::Ahead, lane.ahead.pop_front()?),
        };
        lane.working += 1;
        lane.working_ahead += usize::from(is_ahead);
        self.working += 1;
        Some((name.clone(), urgency, task))
    }

    fn done(&mut self, name: &str, urgency: Urgency) {
        self.working -= 1;
        if let Some(lane) = self.lanes.get_mut(name) {
            lane.working -= 1;
            lane.working_ahead -= usize::from(urgency == Urgency::Ahead);
            if lane.working == 0 && lane.now.is_empty() && lane.ahead.is_empty() {
                self.lanes.remove(name);
            }
        }
    }
}

impl Shared {
    fn run(&self) {
        let mut scratch = Scratch::default();
        let mut state = lock(&self.state);
        while !state.stop {
            if let Some((lane, urgency, task)) = state.take() {
                drop(state);
                task(&mut scratch);
                scratch.decoder.stop = Stop::never();
                scratch.decoder.forget_fetched();
                state = lock(&self.state);
                state.done(&lane, urgency);
                // A task that had to wait may run now.
                self.changed.notify_one();
            } else {
                state = unpoisoned(self.changed.wait(state));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{self, channel};
    use std::time::Duration;

    const TIMEOUT: Duration = Duration::from_secs(60);

    #[test]
    fn urgent_tasks_overtake_any_amount_of_readahead() {
        let io_pool = IoPool::default();
        let lane = || "registry.example".to_owned();
        let (release, held) = channel::<()>();
        let held = Arc::new(Mutex::new(held));
        let (say, heard) = channel();
        for number in 0..50 {
            let (held, say) = (held.clone(), say.clone());
            io_pool.push(Urgency::Ahead, lane(), move |_| {
                let _ = held.lock().unwrap().recv();
                say.send(number).unwrap();
            });
        }
        // All work ahead is stuck; this is done nevertheless.
        for number in 100..150 {
            let say = say.clone();
            io_pool.push(Urgency::Now, lane(), move |_| say.send(number).unwrap());
        }
        let mut done: Vec<i32> = (0..50)
            .map(|_| heard.recv_timeout(TIMEOUT).unwrap())
            .collect();
        done.sort();
        assert_eq!(done, (100..150).collect::<Vec<_>>());
        assert!(matches!(heard.try_recv(), Err(mpsc::TryRecvError::Empty)));
        drop(release);
        let mut done: Vec<i32> = (0..50)
            .map(|_| heard.recv_timeout(TIMEOUT).unwrap())
            .collect();
        done.sort();
        assert_eq!(done, (0..50).collect::<Vec<_>>());
        let state = lock(&io_pool.shared.state);
        assert!(state.threads <= LANE_THREADS + 1);
    }

    #[test]
    fn lanes_that_never_answer_do_not_block_other_lanes() {
        let io_pool = IoPool::default();
        let (release, held) = channel::<()>();
        let held = Arc::new(Mutex::new(held));
        let (say, heard) = channel();
        let stuck = |lane: String, count| {
            for _ in 0..count {
                let (held, say) = (held.clone(), say.clone());
                io_pool.push(Urgency::Now, lane.clone(), move |_| {
                    say.send(true).unwrap();
                    let _ = held.lock().unwrap().recv();
                });
            }
        };
        // One registry with all that guests may ask for at once, then some more.
        stuck("slow.example".into(), 1000);
        for number in 0..5 {
            stuck(format!("slow-{number}.example"), 100);
        }
        for _ in 0..BUSY_THREADS {
            heard.recv_timeout(TIMEOUT).unwrap();
        }
        // Others are done at once: of this computer, and of any other registry.
        for lane in ["", "quick.example", "quick.example", "other.example"] {
            let (done, is_done) = channel();
            io_pool.push(Urgency::Ahead, lane.into(), move |_| done.send(()).unwrap());
            is_done.recv_timeout(TIMEOUT).unwrap();
        }
        let state = lock(&io_pool.shared.state);
        let most = BUSY_THREADS + state.lanes.len();
        assert!(state.working >= BUSY_THREADS && state.working <= most);
        assert!(state.threads <= MAX_THREADS);
        drop((state, release));
        for _ in BUSY_THREADS..1500 {
            heard.recv_timeout(TIMEOUT).unwrap();
        }
    }
}
