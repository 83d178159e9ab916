//! Threads for work that may block: fetching from origins, filling disk caches. So a slow registry
//! does not delay page faults of other VMs.
//!
//! Each task has a *lane*, named by the registries that it may wait for. A slow registry occupies
//! only the threads of its lane: a lane with no task running always gets a thread, however many
//! other lanes have.
//!
//! Tasks with a waiter run first, and prefetching never takes more than half of a lane's threads.
//!
//! The threads also wait for what brings most tasks, the server's sockets, one at a time
//! ([`IoPool::serve`]). A thread does the first task that it brought itself, and another thread
//! waits meanwhile: so a request is not passed from a thread that reads it to one that does it.

use crate::scratch::Scratch;
use jiffy_store::Stop;
use jiffy_sys::log_limit::LogLimit;
use jiffy_sys::mutex::{lock, unpoisoned};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::mem;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, ThreadId};

/// Most threads for one lane: as many as one VMM has disk requests in flight. The threads mostly
/// wait for the network.
const LANE_THREADS: usize = 16;
/// Number of busy threads above which a lane gets no second one.
const BUSY_THREADS: usize = 32;
/// Threads with a task, at most.
const MAX_THREADS: usize = 64;

/// A task; it gets the buffers of its thread.
type Task = Box<dyn FnOnce(&mut Scratch) + Send>;

/// Waits for events and handles them once, without blocking otherwise; false after the last time.
type Turn = Box<dyn FnMut() -> bool + Send>;

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
    /// Who waits for events.
    events: Events,
    stop: bool,
}

#[derive(Default)]
enum Events {
    /// There are none.
    #[default]
    Never,
    /// Nobody: the next thread without a task will.
    Unattended(Turn),
    /// This thread.
    Attended(ThreadId),
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
        // Tasks that events bring are begun at the end of the turn, by the same thread first.
        if !matches!(&state.events, Events::Attended(by) if *by == thread::current().id()) {
            self.shared.call(&mut state);
        }
    }

    /// Takes turns until one returns false: always one thread of the pool waits for events.
    ///
    /// # Errors
    ///
    /// If no thread can be started.
    pub fn serve(&self, turn: impl FnMut() -> bool + Send + 'static) -> io::Result<()> {
        let mut state = lock(&self.shared.state);
        state.events = Events::Unattended(Box::new(turn));
        self.shared.call(&mut state);
        match state.threads {
            0 => Err(io::Error::other("no thread can be started")),
            _ => Ok(()),
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
    /// Threads that are idle, wait for events or are being started.
    fn spare(&self) -> usize {
        self.threads - self.working
    }

    /// How many spare threads it could use.
    fn wanted_threads(&self) -> usize {
        let lanes = self.lanes.values();
        let tasks: usize = lanes.map(|lane| lane.wanted_threads(self.working)).sum();
        tasks + self.for_events()
    }

    /// The threads that wait for events: one, if there are any.
    fn for_events(&self) -> usize {
        usize::from(!matches!(self.events, Events::Never))
    }

    /// The next task and its lane: urgent tasks first, and among them the lane with the fewest
    /// threads. None if no thread would be left for events.
    fn take(&mut self) -> Option<(String, Urgency, Task)> {
        if self.spare() <= self.for_events() {
            return None;
        }
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

    /// Whether a task may begin.
    fn has_ready(&self) -> bool {
        let mut lanes = self.lanes.values();
        lanes.any(|lane| lane.next(self.working).is_some())
    }

    /// What to do to wait for events, if no thread does.
    fn attend(&mut self) -> Option<Turn> {
        let attended = Events::Attended(thread::current().id());
        match mem::replace(&mut self.events, attended) {
            Events::Unattended(turn) => Some(turn),
            others => {
                self.events = others;
                None
            }
        }
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
    /// Wakes a thread, or starts one if too few are spare.
    fn call(self: &Arc<Self>, state: &mut State) {
        // Each request of a VMM may cause the message.
        static LOG: LogLimit = LogLimit::new();
        let most = MAX_THREADS + state.for_events();
        if state.spare() < state.wanted_threads() && state.threads < most {
            let shared = self.clone();
            let thread = thread::Builder::new()
                .name(format!("task-{}", state.threads))
                .spawn(move || shared.run());
            match thread {
                Ok(_) => state.threads += 1,
                // The threads that exist do the task, if there are any.
                Err(error) if LOG.admits() => {
                    tracing::error!(%error, "a thread of the I/O pool cannot be started");
                }
                Err(_) => {}
            }
        }
        self.changed.notify_one();
    }

    fn run(self: &Arc<Self>) {
        let mut scratch = Scratch::default();
        let mut state = lock(&self.state);
        while !state.stop {
            if matches!(state.events, Events::Unattended(_)) && state.has_ready() {
                // Another thread waits for events, or does the next task.
                self.call(&mut state);
            }
            if let Some((lane, urgency, task)) = state.take() {
                drop(state);
                task(&mut scratch);
                scratch.decoder.stop = Stop::never();
                scratch.decoder.forget_fetched();
                state = lock(&self.state);
                state.done(&lane, urgency);
                // A task that had to wait may run now.
                self.changed.notify_one();
            } else if let Some(mut turn) = state.attend() {
                drop(state);
                let goes_on = turn();
                // Without the lock, because the last turn may own the pool.
                let turn = goes_on.then_some(turn);
                state = lock(&self.state);
                state.events = turn.map_or(Events::Never, Events::Unattended);
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
    use std::time::{Duration, Instant};

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

    /// Requests as a server reads them: each turn waits for one, and pushes a task, which reports
    /// itself and then waits to be released.
    fn serve_requests(
        io_pool: &Arc<IoPool>,
        release: &Arc<Mutex<mpsc::Receiver<()>>>,
    ) -> (mpsc::Sender<u32>, mpsc::Receiver<(u32, ThreadId, ThreadId)>) {
        let (requests, incoming) = channel();
        let (say, heard) = channel();
        let (pool, release) = (Arc::downgrade(io_pool), release.clone());
        let serving = io_pool.serve(move || {
            let (Ok(request), Some(pool)) = (incoming.recv(), pool.upgrade()) else {
                return false;
            };
            let (reader, say, release) = (thread::current().id(), say.clone(), release.clone());
            pool.push(Urgency::Now, "registry.example".into(), move |_| {
                say.send((request, reader, thread::current().id())).unwrap();
                let _ = lock(&release).recv();
            });
            true
        });
        serving.unwrap();
        (requests, heard)
    }

    #[test]
    fn a_request_is_done_by_the_thread_that_read_it_and_delays_no_other() {
        let io_pool = Arc::new(IoPool::default());
        let (release, held) = channel::<()>();
        let (requests, heard) = serve_requests(&io_pool, &Arc::new(Mutex::new(held)));
        let mut threads = Vec::new();
        for number in 0..LANE_THREADS as u32 {
            requests.send(number).unwrap();
            // All requests before this one are stuck.
            let (request, reader, worker) = heard.recv_timeout(TIMEOUT).unwrap();
            assert_eq!(request, number);
            assert_eq!(reader, worker, "the request was passed to another thread");
            assert!(!threads.contains(&worker));
            threads.push(worker);
        }
        // One more waits for a thread of its lane, and requests are still read.
        requests.send(100).unwrap();
        let (done, is_done) = channel();
        io_pool.push(Urgency::Ahead, "".into(), move |_| done.send(()).unwrap());
        is_done.recv_timeout(TIMEOUT).unwrap();
        assert!(matches!(heard.try_recv(), Err(mpsc::TryRecvError::Empty)));
        release.send(()).unwrap();
        assert_eq!(heard.recv_timeout(TIMEOUT).unwrap().0, 100);
        drop(requests);
    }

    #[test]
    fn a_thread_is_always_left_for_events() {
        let io_pool = Arc::new(IoPool::default());
        let (release, held) = channel::<()>();
        let (requests, heard) = serve_requests(&io_pool, &Arc::new(Mutex::new(held)));
        let (say, busy) = channel();
        let (let_go, kept) = channel::<()>();
        let kept = Arc::new(Mutex::new(kept));
        for number in 0..MAX_THREADS {
            let (say, kept) = (say.clone(), kept.clone());
            io_pool.push(Urgency::Now, format!("lane-{number}"), move |_| {
                say.send(()).unwrap();
                let _ = kept.lock().unwrap().recv();
            });
        }
        for _ in 0..MAX_THREADS {
            busy.recv_timeout(TIMEOUT).unwrap();
        }
        // It is read, because the number of its tasks grows, but no thread may do it.
        requests.send(1).unwrap();
        let queued = || {
            let state = lock(&io_pool.shared.state);
            let lane = state.lanes.get("registry.example");
            lane.is_some_and(|lane| lane.now.len() == 1)
        };
        let until = Instant::now() + TIMEOUT;
        while !queued() && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
        assert!(queued());
        let state = lock(&io_pool.shared.state);
        assert_eq!(
            (state.working, state.threads),
            (MAX_THREADS, MAX_THREADS + 1)
        );
        drop(state);
        let_go.send(()).unwrap();
        assert_eq!(heard.recv_timeout(TIMEOUT).unwrap().0, 1);
        drop((let_go, release, requests));
    }
}
