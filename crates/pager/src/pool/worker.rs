//! One worker's loop.

use super::{Deferred, Job, Shared, VM_EVENTS, WAKE};
use crate::io_pool::Urgency;
use crate::scratch::Scratch;
use crate::vm::{self, Fault, Stop, Vm};
use crate::window::WINDOW;
use jiffy_sys::clock::monotonic_ns;
use jiffy_sys::mutex::{lock, read};
use jiffy_sys::userfaultfd::Event;
use rustix::event::{Timespec, epoll};
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;
use std::time::Duration;

/// The chunk size of most images, bytes.
const CHUNK: usize = 8 << 10;
/// Faults of one VM that are served before another VM's.
const FAULTS_PER_TURN: usize = 32;
/// VMs that are served before a piece of a job is done: faults go first, but jobs must end.
const TURNS_PER_PIECE: u32 = 16;
/// How often a fault is tried while its VM's mappings change, before it is deferred.
const MAX_TRIES: u32 = 20;
/// How long it is deferred.
const DEFER_TIME: Duration = Duration::from_micros(500);

/// State of one worker.
#[derive(Default)]
pub(super) struct Worker {
    pub scratch: Scratch,
    events: Vec<Event>,
    read: Vec<Fault>,
    turns: u32,
}

pub(super) fn run(shared: &Arc<Shared>, is_ready: Sender<()>) {
    let mut worker = Worker {
        scratch: Scratch::in_memory(CHUNK, vm::PIECE as usize, WINDOW as usize),
        ..Worker::default()
    };
    drop(is_ready);
    while !shared.stop.load(Ordering::Acquire) {
        shared.retry_deferred();
        if shared.serve_shared(&mut worker) {
            continue;
        }
        if worker.turns >= TURNS_PER_PIECE && shared.has_jobs() {
            shared.work(&mut worker);
            // Look for the work that woke this thread before sleeping again.
            continue;
        }
        let timeout = shared.timeout();
        if !shared.wait_and_serve(&mut worker, timeout) {
            shared.work(&mut worker);
        }
    }
    // Wakes the next worker.
    shared.wake();
}

impl Shared {
    /// How long to sleep without an event.
    fn timeout(&self) -> Option<Duration> {
        if self.has_jobs() {
            Some(Duration::ZERO)
        } else if self.deferred_due.load(Ordering::Acquire) != 0 {
            Some(DEFER_TIME)
        } else {
            None
        }
    }

    /// Serves one VM that has events; false if none has.
    pub(super) fn wait_and_serve(
        self: &Arc<Self>,
        worker: &mut Worker,
        timeout: Option<Duration>,
    ) -> bool {
        let timeout = timeout.map(|timeout| Timespec {
            tv_sec: 0,
            tv_nsec: timeout.subsec_nanos().into(),
        });
        let mut room = [MaybeUninit::uninit()];
        let (token, flags) = match epoll::wait(&self.epoll, &mut room, timeout.as_ref()) {
            Ok(([event], _)) => (event.data.u64(), event.flags),
            _ => return false,
        };
        if token == WAKE {
            return false;
        }
        let vm = read(&self.vms).get(&token).cloned();
        match vm {
            None => {}
            // The error condition lasts: epoll would report it forever, with nothing to read.
            Some(vm) if flags.contains(epoll::EventFlags::ERR) => {
                vm.fail("its VMM has made the userfaultfd blocking".into());
            }
            Some(vm) => {
                worker.turns += 1;
                self.serve_turn(&vm, worker);
            }
        }
        true
    }

    /// Serves a VM until it has no faults or other VMs have waited long enough. A thread whose
    /// fault was served often faults again before this worker could sleep.
    fn serve_turn(self: &Arc<Self>, vm: &Arc<Vm>, worker: &mut Worker) {
        for _ in 0..FAULTS_PER_TURN {
            if vm.has_ended() {
                return;
            }
            self.read(vm, worker);
            let Some(fault) = worker.read.pop() else {
                break;
            };
            self.share(vm, worker);
            self.serve_fault(vm, fault, worker);
            while let Some((vm, fault)) = self.next_shared() {
                self.serve_fault(&vm, fault, worker);
            }
            if vm.has_job() {
                // The VM waits less if its working set is filled before it faults.
                worker.turns = TURNS_PER_PIECE;
                break;
            }
        }
        // Rearmed only now, because waking another worker for one vCPU is useless. Fails if the VM
        // was detached meanwhile.
        let data = epoll::EventData::new_u64(vm.token());
        let _ = epoll::modify(&self.epoll, vm, data, VM_EVENTS);
    }

    fn read(&self, vm: &Vm, worker: &mut Worker) {
        worker.read.clear();
        vm.take_faults(&mut worker.events, &mut worker.read);
        // Faults are popped from the end, so the oldest goes there.
        worker.read.reverse();
    }

    /// Lets other workers serve the faults that were read beyond the first.
    fn share(&self, vm: &Arc<Vm>, worker: &mut Worker) {
        if worker.read.is_empty() {
            return;
        }
        let rest = worker.read.drain(..).rev().map(|fault| (vm.clone(), fault));
        lock(&self.faults).extend(rest);
        self.wake();
    }

    fn next_shared(&self) -> Option<(Arc<Vm>, Fault)> {
        lock(&self.faults).pop_front()
    }

    /// Serves one fault that another worker has read; false if there is none.
    fn serve_shared(self: &Arc<Self>, worker: &mut Worker) -> bool {
        let mut faults = lock(&self.faults);
        let Some((vm, fault)) = faults.pop_front() else {
            return false;
        };
        let more = !faults.is_empty();
        drop(faults);
        if more {
            self.wake();
        }
        self.serve_fault(&vm, fault, worker);
        true
    }

    fn serve_fault(self: &Arc<Self>, vm: &Arc<Vm>, fault: Fault, worker: &mut Worker) {
        if vm.needs_origin(fault) {
            return self.fetch_and_serve(vm, fault);
        }
        for _ in 0..MAX_TRIES {
            if vm.has_ended() {
                return;
            }
            match vm.serve(fault, &mut worker.scratch) {
                Ok(()) => return self.fill_around(vm, fault, worker),
                Err(Stop::Changing) => {
                    // The kernel blocks the change until its event is read.
                    self.read(vm, worker);
                    self.share(vm, worker);
                    std::thread::yield_now();
                }
                Err(Stop::Gone) => return vm.end(),
                Err(Stop::Failed(sentence)) => return vm.fail(sentence),
            }
        }
        self.defer(Deferred::Fault(vm.clone(), fault));
    }

    /// Makes the I/O pool serve a fault whose chunk must be fetched; the fetching thread also fills
    /// it.
    fn fetch_and_serve(self: &Arc<Self>, vm: &Arc<Vm>, fault: Fault) {
        let (shared, vm) = (Arc::downgrade(self), vm.clone());
        let lane = vm.image().waits_for();
        self.io_pool.push(Urgency::Now, lane, move |scratch| {
            if vm.has_ended() {
                return;
            }
            scratch.decoder.stop = vm.stop().clone();
            match vm.serve(fault, scratch) {
                Ok(()) => {}
                // A worker has to read the event of the change. The chunk is in the file by now.
                Err(Stop::Changing) => {
                    if let Some(shared) = shared.upgrade() {
                        lock(&shared.faults).push_back((vm, fault));
                        shared.wake();
                    }
                }
                Err(Stop::Gone) => vm.end(),
                // The VM has ended, so this is not a failure.
                Err(Stop::Failed(_)) if vm.has_ended() => {}
                Err(Stop::Failed(sentence)) => vm.fail(sentence),
            }
        });
    }

    /// Fills the units around a fault. Errors are ignored, because no fault waits for these units.
    fn fill_around(&self, vm: &Arc<Vm>, fault: Fault, worker: &mut Worker) {
        if self.settings.fault_around <= vm.unit() {
            return;
        }
        for unit in vm.around(fault, self.settings.fault_around) {
            if vm.is_filled(unit) {
                continue;
            }
            if !vm.is_local(unit) {
                return;
            }
            match vm.fill_unit(unit, None, &mut worker.scratch) {
                Ok(_) => vm.counters().prefetched(vm.chunks_of_unit()),
                Err(_) => return,
            }
        }
    }

    /// Does a piece of a job; false if there is none.
    fn work(self: &Arc<Self>, worker: &mut Worker) -> bool {
        worker.turns = 0;
        let Some((job, piece)) = self.next_piece() else {
            return false;
        };
        if self.has_jobs() {
            // There may be a piece for another worker.
            self.wake();
        }
        self.do_piece(&job, piece, worker);
        true
    }

    fn do_piece(self: &Arc<Self>, job: &Arc<Job>, piece: usize, worker: &mut Worker) {
        let mut scratch = std::mem::take(&mut worker.scratch);
        let mut between = |scratch: &mut Scratch| {
            // More urgent work goes first.
            std::mem::swap(&mut worker.scratch, scratch);
            self.wait_and_serve(worker, Some(Duration::ZERO));
            while self.serve_shared(worker) {}
            std::mem::swap(&mut worker.scratch, scratch);
        };
        let outcome = job.work(piece, &mut scratch, &mut between);
        worker.scratch = scratch;
        match outcome {
            Ok(problem) => job.finished(problem),
            Err(Stop::Changing) => {
                self.read(job.vm(), worker);
                self.share(job.vm(), worker);
                self.defer(Deferred::Piece(job.clone(), piece));
            }
            Err(Stop::Gone) => {
                job.vm().end();
                job.finished(Some("the VM has ended".into()));
            }
            Err(Stop::Failed(sentence)) => job.finished(Some(sentence)),
        }
    }

    fn defer(&self, entry: Deferred) {
        let mut deferred = lock(&self.deferred);
        deferred.push(entry);
        let due = monotonic_ns() + DEFER_TIME.as_nanos() as u64;
        self.deferred_due.store(due, Ordering::Release);
    }

    /// Makes deferred faults urgent again when they are due.
    fn retry_deferred(&self) {
        let due = self.deferred_due.load(Ordering::Acquire);
        if due == 0 || monotonic_ns() < due {
            return;
        }
        self.deferred_due.store(0, Ordering::Release);
        let deferred = std::mem::take(&mut *lock(&self.deferred));
        for entry in deferred {
            match entry {
                Deferred::Fault(vm, fault) => lock(&self.faults).push_back((vm, fault)),
                Deferred::Piece(job, piece) => {
                    job.put_back(piece);
                    self.push(job);
                }
            }
        }
    }
}
