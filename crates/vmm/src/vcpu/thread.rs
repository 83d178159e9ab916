//! The thread that runs a vCPU, with pause and resume.
//!
//! ```text
//!         pause           left the guest
//!  Runs ─────────▶ Parks ────────────────▶ Parked
//!    │               │                       │
//!    │ end           │ end                   │ end
//!    └──────▶ Ends ◀─┘                       ▼
//!               └───────────────────────▶ Ended
//!                    left the guest
//! ```
//!
//! `resume` leads from `Parks` and `Parked` back to `Runs`.

use super::Vcpu;
use super::exit::{self, Board, Next};
use crate::ending::Ending;
use crate::mailbox::{Mailbox, Notice};
use crate::stats::Sampler;
use crate::workers::ThreadStarter;
use jiffy_devices::virtio::device::Job;
use jiffy_sys::mutex::{lock, unpoisoned};
use jiffy_sys::{activity, clock, kick};
use jiffy_wire::vmm::ExitReason;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};

type Task = Box<dyn FnOnce(&Vcpu) + Send>;

/// A running or parked vCPU.
pub struct VcpuThread {
    shared: Arc<Shared>,
    job: Option<Job>,
}

struct Shared {
    control: Mutex<Control>,
    changed: Condvar,
    /// Whether `control` has changed. It is set before the kick, and read after `immediate_exit`
    /// was cleared: in either order, the guest is not entered before `control` was checked.
    pending: AtomicBool,
    target: OnceLock<kick::Target>,
    mailbox: Arc<Mailbox>,
}

struct Control {
    state: State,
    /// To be done next, in any state: the slot of a message, taken before the state counts.
    task: Option<Task>,
}

/// What the thread does, or is asked to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// The vCPU is in the guest, or enters it.
    Runs,
    /// It is asked to leave the guest.
    Parks,
    /// It is out of the guest, and waits.
    Parked,
    /// It is asked to leave the guest for good.
    Ends,
    /// It is out of the guest for good.
    Ended,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Request {
    Run,
    Park,
    End,
}

impl State {
    fn is_out(self) -> bool {
        matches!(self, State::Parked | State::Ended)
    }

    fn asked(self, request: Request) -> State {
        match (self, request) {
            (State::Ends | State::Ended, _) => self,
            (_, Request::Run) => State::Runs,
            (State::Parked, Request::Park) => State::Parked,
            (State::Runs | State::Parks, Request::Park) => State::Parks,
            (State::Parked, Request::End) => State::Ended,
            (State::Runs | State::Parks, Request::End) => State::Ends,
        }
    }
}

enum Work {
    Run,
    Task(Task),
    End,
}

impl VcpuThread {
    /// Starts a thread that runs the guest, or, if `parked`, waits for
    /// [`resume`](VcpuThread::resume).
    ///
    /// # Errors
    ///
    /// As for [`ThreadStarter::for_vcpu`].
    pub fn start(
        vcpu: Vcpu,
        board: Board,
        mailbox: Arc<Mailbox>,
        parked: bool,
        workers: &ThreadStarter,
    ) -> io::Result<VcpuThread> {
        let shared = Arc::new(Shared {
            control: Mutex::new(Control {
                state: if parked { State::Parks } else { State::Runs },
                task: None,
            }),
            changed: Condvar::new(),
            pending: AtomicBool::new(false),
            target: OnceLock::new(),
            mailbox,
        });
        let thread_shared = shared.clone();
        let name = format!("vcpu {}", vcpu.index());
        let body = move |confined: io::Result<()>| {
            let _ = thread_shared.target.set(kick::Target::current());
            match confined {
                Ok(()) => run(vcpu, &board, &thread_shared),
                Err(error) => thread_shared.mailbox.push(Notice::Ended(Ending {
                    reason: ExitReason::HostError,
                    message: format!("a vCPU's thread could not be confined: {error}"),
                })),
            }
            thread_shared.lock().state = State::Ended;
            thread_shared.mailbox.push(Notice::Parked);
        };
        let job = workers.for_vcpu(&name, Box::new(body))?;
        Ok(VcpuThread {
            shared,
            job: Some(job),
        })
    }

    /// Asks the vCPU to leave the guest. It has left once [`is_parked`](VcpuThread::is_parked) is
    /// true.
    pub fn pause(&self) {
        self.shared.set_request(Request::Park);
    }

    /// Lets the vCPU enter the guest again.
    pub fn resume(&self) {
        self.shared.set_request(Request::Run);
    }

    /// Asks the thread to end. It has ended once [`is_parked`](VcpuThread::is_parked) is true.
    pub fn end(&self) {
        self.shared.set_request(Request::End);
    }

    /// Whether the vCPU is out of the guest and stays out.
    pub fn is_parked(&self) -> bool {
        self.shared.lock().state.is_out()
    }

    /// Runs `task` on the thread of the vCPU, which must be parked.
    pub fn send(&self, task: impl FnOnce(&Vcpu) + Send + 'static) {
        self.shared.lock().task = Some(Box::new(task));
        self.shared.changed.notify_one();
    }

    /// Waits for a thread that was asked to end.
    pub fn join(mut self) {
        if let Some(job) = self.job.take() {
            // A panic was reported when it happened.
            let _ = job.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Control> {
        lock(&self.control)
    }

    fn set_request(&self, request: Request) {
        let mut control = self.lock();
        control.state = control.state.asked(request);
        drop(control);
        self.changed.notify_one();
        // A vCPU that is in the guest and is to continue need not be kicked.
        if request != Request::Run {
            self.pending.store(true, Ordering::SeqCst);
            if let Some(target) = self.target.get() {
                target.kick();
            }
        }
    }

    /// Parks the vCPU without a request.
    fn park(&self) {
        let mut control = self.lock();
        if control.state == State::Runs {
            control.state = State::Parks;
        }
    }

    /// Waits until there is something to do.
    fn next_work(&self) -> Work {
        let mut control = self.lock();
        loop {
            self.pending.store(false, Ordering::SeqCst);
            if let Some(task) = control.task.take() {
                return Work::Task(task);
            }
            match control.state {
                State::Runs => return Work::Run,
                State::Ends | State::Ended => return Work::End,
                State::Parks => {
                    control.state = State::Parked;
                    self.mailbox.push(Notice::Parked);
                }
                State::Parked => control = unpoisoned(self.changed.wait(control)),
            }
        }
    }
}

fn run(mut vcpu: Vcpu, board: &Board, shared: &Shared) {
    let mut announced = vcpu.index() != 0;
    let mut sampler = None;
    with_kick_flag(&mut vcpu, |vcpu, flag| {
        loop {
            match shared.next_work() {
                Work::End => return,
                Work::Task(task) => {
                    task(vcpu);
                    continue;
                }
                Work::Run => {}
            }
            if !announced {
                announced = true;
                shared.mailbox.push(Notice::FirstRun {
                    at_ns: clock::monotonic_ns(),
                });
            }
            if sampler.is_none() && activity::is_recorded() {
                sampler = vcpu.sampler();
            }
            stay_in_guest(vcpu, board, shared, flag, sampler.as_mut());
            if let Some(sampler) = &mut sampler {
                sampler.sample(true);
            }
            if let Next::End(ending) = exit::complete(&mut vcpu.fd, board) {
                end(ending, shared);
            }
        }
    });
}

/// Runs the guest until there is something to check.
fn stay_in_guest(
    vcpu: &mut Vcpu,
    board: &Board,
    shared: &Shared,
    flag: &AtomicU8,
    mut sampler: Option<&mut Sampler>,
) {
    loop {
        if let Some(sampler) = &mut sampler {
            sampler.sample(false);
        }
        flag.store(0, Ordering::SeqCst);
        if shared.pending.load(Ordering::SeqCst) {
            return;
        }
        match exit::step(&mut vcpu.fd, board) {
            Next::Run => {}
            // The guest has reset or powered off, and must not run until the VM ends.
            Next::CheckRequests if board.power.request().is_some() => return shared.park(),
            Next::CheckRequests => {}
            Next::End(ending) => return end(ending, shared),
        }
    }
}

/// Reports the end of the VM; the vCPU stays out of the guest until then.
fn end(ending: Ending, shared: &Shared) {
    shared.mailbox.push(Notice::Ended(ending));
    shared.park();
}

/// Lets kicks of this thread set the vCPU's `immediate_exit`.
#[allow(unsafe_code)] // The flag lies in memory shared with the kernel.
fn with_kick_flag(vcpu: &mut Vcpu, body: impl FnOnce(&mut Vcpu, &AtomicU8)) {
    let flag = &raw mut vcpu.fd.get_kvm_run().immediate_exit;
    // SAFETY: the mapping of kvm_run lives as long as the vCPU, which outlives this call; the byte
    // is only accessed by the kernel, and atomically here and in this thread's signal handler, and
    // by `complete` on this thread.
    let flag = unsafe { AtomicU8::from_ptr(flag) };
    kick::with_flag(flag, || body(vcpu, flag));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parked_vcpu_stays_out_of_the_guest_until_it_is_resumed() {
        assert_eq!(State::Runs.asked(Request::Park), State::Parks);
        assert_eq!(State::Parked.asked(Request::Park), State::Parked);
        for state in [State::Parks, State::Parked] {
            assert_eq!(state.asked(Request::Run), State::Runs);
        }
        // It need not enter the guest to end.
        assert!(State::Parked.asked(Request::End).is_out());
        assert!(!State::Parks.asked(Request::End).is_out());
    }

    #[test]
    fn a_thread_that_ends_takes_no_other_request() {
        for state in [State::Ends, State::Ended] {
            for request in [Request::Run, Request::Park, Request::End] {
                assert_eq!(state.asked(request), state);
            }
        }
    }
}
