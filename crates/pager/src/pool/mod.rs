//! The workers for all VMs: a fixed number of threads, however many VMs there are.
//!
//! A worker takes the most urgent work: a fault that another worker has read but not served, then a
//! VM with new faults, and only then a piece of a [`Job`] (prefetch, completion). One worker at a
//! time reads a VM's events; if it reads more than one fault, it shares them with the others.

mod job;
mod worker;

pub use job::Job;

use crate::io_pool::{IoPool, Urgency};
use crate::vm::{Fault, Vm};
use jiffy_sys::mutex::{lock, write};
use rustix::event::{EventfdFlags, epoll, eventfd};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, RwLock, mpsc};
use std::thread::{self, JoinHandle};

/// The token of the wake-up descriptor; VMs have other tokens.
const WAKE: u64 = 0;

/// Reported to one worker, which rearms the event after it has served the VM.
const VM_EVENTS: epoll::EventFlags = epoll::EventFlags::IN.union(epoll::EventFlags::ONESHOT);

/// Bytes of an image that are prefetched at once, uncompressed.
const PIECE: usize = 4 << 20;

/// How faults are served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Threads.
    pub workers: usize,
    /// Bytes filled around a fault, a power of two; less than a unit means
    /// none.
    pub fault_around: u64,
}

impl Default for Settings {
    /// As many workers as processors.
    fn default() -> Settings {
        Settings {
            workers: thread::available_parallelism().map_or(1, usize::from),
            fault_around: 0,
        }
    }
}

/// The workers. Dropping it ends them.
pub struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

/// State shared by the workers.
struct Shared {
    settings: Settings,
    io_pool: Arc<IoPool>,
    epoll: OwnedFd,
    wake: OwnedFd,
    stop: AtomicBool,
    vms: RwLock<HashMap<u64, Arc<Vm>>>,
    /// Faults that were read, but are not served yet.
    faults: Mutex<VecDeque<(Arc<Vm>, Fault)>>,
    /// Faults to be tried again after the VMs' mappings have changed.
    deferred: Mutex<Vec<Deferred>>,
    /// When the deferred faults are due, CLOCK_MONOTONIC nanoseconds; 0 if there are none.
    deferred_due: AtomicU64,
    jobs: Mutex<VecDeque<Arc<Job>>>,
    /// The number of jobs, readable without the lock.
    jobs_waiting: AtomicUsize,
}

enum Deferred {
    Fault(Arc<Vm>, Fault),
    Piece(Arc<Job>, usize),
}

impl Pool {
    /// Starts the workers. They are ready when this returns.
    ///
    /// # Errors
    ///
    /// If epoll or an eventfd can't be made, or a thread can't be started.
    pub fn start(settings: Settings, io_pool: Arc<IoPool>) -> io::Result<Pool> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(
            &epoll,
            &wake,
            epoll::EventData::new_u64(WAKE),
            epoll::EventFlags::IN | epoll::EventFlags::ET,
        )?;
        let shared = Arc::new(Shared {
            settings,
            io_pool,
            epoll,
            wake,
            stop: AtomicBool::new(false),
            vms: RwLock::default(),
            faults: Mutex::default(),
            deferred: Mutex::default(),
            deferred_due: AtomicU64::new(0),
            jobs: Mutex::default(),
            jobs_waiting: AtomicUsize::new(0),
        });
        let mut pool = Pool {
            shared: shared.clone(),
            threads: Vec::new(),
        };
        // Each worker drops its end when it is ready.
        let (is_ready, ready) = mpsc::channel();
        for index in 0..settings.workers.max(1) {
            let (shared, is_ready) = (shared.clone(), is_ready.clone());
            let thread = thread::Builder::new()
                .name(format!("worker-{index}"))
                .spawn(move || worker::run(&shared, is_ready))?;
            pool.threads.push(thread);
        }
        drop(is_ready);
        let _ = ready.recv();
        Ok(pool)
    }

    /// Begins to serve this VM.
    ///
    /// # Errors
    ///
    /// If epoll refuses its userfaultfd.
    pub fn attach(&self, vm: Arc<Vm>) -> io::Result<()> {
        let token = vm.token();
        assert_ne!(token, WAKE, "a VM's token is not 0");
        write(&self.shared.vms).insert(token, vm.clone());
        let added = epoll::add(
            &self.shared.epoll,
            &*vm,
            epoll::EventData::new_u64(token),
            VM_EVENTS,
        );
        if let Err(error) = added {
            self.detach(&vm);
            return Err(error.into());
        }
        Ok(())
    }

    /// Stops serving a VM. Work in progress for it ends soon; its jobs are cancelled.
    pub fn detach(&self, vm: &Vm) {
        vm.end();
        write(&self.shared.vms).remove(&vm.token());
        // The VMM shares the open file description, so closing our descriptor would not remove it
        // from epoll.
        let _ = epoll::delete(&self.shared.epoll, vm);
        lock(&self.shared.faults).retain(|(other, _)| other.token() != vm.token());
        // Workers give up the jobs of a VM that has ended, and answer the clients that wait.
        self.shared.wake();
    }

    /// Queues a job, which is done while no fault waits.
    pub fn push(&self, job: Job) {
        self.shared.push(Arc::new(job));
    }

    /// Fills the image's working set, if it has one, while no fault waits. `then` is called if no
    /// chunk of it was missing and all of it is in memory.
    pub fn prefetch(&self, vm: &Arc<Vm>, then: impl FnOnce() + Send + 'static) {
        let chunks = vm.working_set();
        if vm.image().is_whole() {
            if let Some(job) = Job::prefetch(vm.clone(), chunks, Box::new(then)) {
                self.push(job);
            }
            return;
        }
        // Fetched in large pieces, each filled once it has arrived.
        let lane = vm.image().waits_for();
        for piece in chunks.chunks(PIECE / vm.image().chunk_size()) {
            let (vm, piece) = (vm.clone(), piece.to_vec());
            let shared = Arc::downgrade(&self.shared);
            self.shared
                .io_pool
                .push(Urgency::Ahead, lane.clone(), move |scratch| {
                    if vm.has_ended() {
                        return;
                    }
                    scratch.decoder.stop = vm.stop().clone();
                    if let Err(error) = vm.image().fetch(&mut scratch.decoder, &piece)
                        && vm.log().admits()
                    {
                        tracing::warn!(vm = vm.name(), "{error}");
                    }
                    let here: Vec<u32> = piece
                        .into_iter()
                        .filter(|chunk| vm.image().is_local(*chunk))
                        .collect();
                    let job = Job::prefetch(vm, here, Box::new(|| {}));
                    if let (Some(shared), Some(job)) = (shared.upgrade(), job) {
                        shared.push(Arc::new(job));
                    }
                });
        }
    }

    /// Fills everything that is missing, then calls `done`.
    pub fn complete(&self, vm: Arc<Vm>, done: job::Done) {
        if vm.image().is_whole() {
            return self.push(Job::complete(vm, done));
        }
        let shared = Arc::downgrade(&self.shared);
        let lane = vm.image().waits_for();
        self.shared
            .io_pool
            .push(Urgency::Ahead, lane, move |scratch| {
                scratch.decoder.stop = vm.stop().clone();
                let image = vm.image();
                let chunks = image.size().div_ceil(image.chunk_size() as u64) as u32;
                let step = PIECE / image.chunk_size();
                for first in (0..chunks).step_by(step) {
                    if vm.has_ended() {
                        break;
                    }
                    let piece: Vec<u32> = (first..chunks.min(first + step as u32)).collect();
                    if let Err(error) = image.fetch(&mut scratch.decoder, &piece) {
                        return done(Some(error.0));
                    }
                }
                match shared.upgrade() {
                    Some(shared) => shared.push(Arc::new(Job::complete(vm, done))),
                    None => done(Some("the pager is ending".into())),
                }
            });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.wake();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Wakes one sleeping worker; if it finds no work, it sleeps again.
    fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    fn push(&self, job: Arc<Job>) {
        let mut jobs = lock(&self.jobs);
        jobs.push_back(job);
        self.jobs_waiting.store(jobs.len(), Ordering::Release);
        drop(jobs);
        self.wake();
    }

    /// The next piece of the job whose turn it is.
    fn next_piece(&self) -> Option<(Arc<Job>, usize)> {
        let mut jobs = lock(&self.jobs);
        let mut found = None;
        while let Some(job) = jobs.pop_front() {
            if let Some(piece) = job.claim() {
                jobs.push_back(job.clone());
                found = Some((job, piece));
                break;
            }
        }
        self.jobs_waiting.store(jobs.len(), Ordering::Release);
        found
    }

    fn has_jobs(&self) -> bool {
        self.jobs_waiting.load(Ordering::Acquire) > 0
    }
}
