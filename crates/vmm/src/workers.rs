//! The threads of a VM, each in the sandbox of its role for as long as it lives. A thread whose
//! work is done waits for more work of that role: a pause ends the work of devices, and starting a
//! thread with its sandbox costs more than the rest of a resume.

use crate::mailbox::{Mailbox, SpawnRequest};
use crate::sandbox::{Role, Sandbox};
use jiffy_devices::virtio::device::{Job, WorkerRole, Workers};
use jiffy_sys::mutex::lock;
use jiffy_sys::termination;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};

/// Bytes of a thread's stack; only touched pages take memory.
pub(crate) const STACK: usize = 256 << 10;

/// The threads that nearly every VM needs.
const USUAL: [(Role, &str); 3] = [
    (Role::Vcpu, "vcpu 0"),
    (Role::Device(WorkerRole::Block), "block"),
    (Role::Device(WorkerRole::Vsock), "vsock"),
];

/// A thread's function. It gets the result of confining the thread, and decides whether to continue
/// if that failed.
pub type Body = Box<dyn FnOnce(io::Result<()>) + Send>;

/// Work, and the channel on which its end is reported.
struct Work {
    body: Body,
    done: SyncSender<thread::Result<()>>,
}

/// A thread without work. It ends when this is dropped.
#[derive(Debug)]
struct Idle {
    role: Role,
    name: String,
    work: Sender<Work>,
}

/// Threads that have no work yet.
#[derive(Debug, Default)]
pub struct IdleThreads(Vec<Idle>);

impl IdleThreads {
    /// Starts the threads that a VM usually needs, before its configuration is known. They are
    /// confined at once, because they take no part in building the VM.
    ///
    /// # Errors
    ///
    /// If a thread can't be started.
    pub fn usual(sandbox: Sandbox) -> io::Result<IdleThreads> {
        let start = |(role, name)| Idle::start(role, name, sandbox, true);
        USUAL
            .into_iter()
            .map(start)
            .collect::<Result<_, _>>()
            .map(IdleThreads)
    }

    /// Keeps the threads of these roles, and those of vCPUs; the others end.
    pub fn keep(mut self, needed: &[WorkerRole]) -> IdleThreads {
        self.0.retain(|idle| match idle.role {
            Role::Vcpu | Role::Main | Role::MainByName => true,
            Role::Device(role) => needed.contains(&role),
        });
        self
    }
}

impl Idle {
    /// Starts a thread. It is confined now, or before its first work.
    fn start(role: Role, name: &str, sandbox: Sandbox, now: bool) -> io::Result<Idle> {
        let (work, works) = channel();
        thread::Builder::new()
            .name(name.to_owned())
            .stack_size(STACK)
            .spawn(move || {
                termination::block_in_this_thread();
                // A failure is reported when the thread gets its first work.
                let confined = now && sandbox.enter(role).is_ok();
                run_jobs(&works, confined, || sandbox.enter(role));
            })?;
        Ok(Idle {
            role,
            name: name.to_owned(),
            work,
        })
    }
}

/// Does work as it comes, until the channel is closed.
fn run_jobs(works: &Receiver<Work>, mut confined: bool, confine: impl Fn() -> io::Result<()>) {
    while let Ok(Work { body, done }) = works.recv() {
        let allowed = if confined { Ok(()) } else { confine() };
        confined = allowed.is_ok();
        let result = catch_unwind(AssertUnwindSafe(|| body(allowed)));
        let goes_on = confined && result.is_ok();
        let _ = done.send(result);
        if !goes_on {
            return;
        }
    }
}

/// Gives work to idle threads, and starts threads if none is idle. Only the main thread, which
/// created it, starts threads; other threads ask it to.
pub struct ThreadStarter {
    mailbox: Arc<Mailbox>,
    main: ThreadId,
    sandbox: Sandbox,
    threads: Arc<Mutex<Threads>>,
}

struct Threads {
    idle: Vec<Idle>,
    device_jobs: DeviceJobs,
}

/// When the jobs of devices begin.
enum DeviceJobs {
    /// Later; these wait.
    Deferred(Vec<(Sender<Work>, Work)>),
    /// At once.
    Start,
}

impl ThreadStarter {
    /// Must be created on the main thread; `idle` are threads that wait for work.
    pub fn new(mailbox: Arc<Mailbox>, sandbox: Sandbox, idle: IdleThreads) -> ThreadStarter {
        ThreadStarter {
            mailbox,
            main: thread::current().id(),
            sandbox,
            threads: Arc::new(Mutex::new(Threads {
                idle: idle.0,
                device_jobs: DeviceJobs::Deferred(Vec::new()),
            })),
        }
    }

    /// Starts the jobs of devices. Until then they are held back, so that they do not delay
    /// the guest's first instruction; doorbells stay pending meanwhile. Must be called when the
    /// guest runs, and before anything waits for a device to stop.
    pub fn start_device_jobs(&self) {
        let before = {
            let mut threads = lock(&self.threads);
            std::mem::replace(&mut threads.device_jobs, DeviceJobs::Start)
        };
        let DeviceJobs::Deferred(deferred) = before else {
            return;
        };
        for (to, work) in deferred {
            // If the thread has ended, the code that waits for the work gets an error.
            let _ = to.send(work);
        }
    }

    /// Handles the request of another thread. Must be called on the main thread.
    pub fn serve(&self, request: SpawnRequest) {
        request.answer(|role, name, body| self.for_device(role, name, body));
    }

    /// Runs `body` on a vCPU's thread, at once. Must be called on the main thread.
    ///
    /// # Errors
    ///
    /// If no thread is idle and none can be started, or the idle one has ended.
    pub fn for_vcpu(&self, name: &str, body: Body) -> io::Result<Job> {
        self.submit(Role::Vcpu, name, body)
    }

    fn for_device(
        &self,
        role: WorkerRole,
        name: &str,
        body: Box<dyn FnOnce() + Send>,
    ) -> io::Result<Job> {
        let body = move |confined| match confined {
            Ok(()) => body(),
            Err(error) => {
                tracing::error!(%error, "a device's thread could not be confined");
                std::process::abort();
            }
        };
        self.submit(Role::Device(role), name, Box::new(body))
    }

    fn submit(&self, role: Role, name: &str, body: Body) -> io::Result<Job> {
        let worker = match self.take_idle(role, name) {
            Some(idle) => idle,
            None => Idle::start(role, name, self.sandbox, false)?,
        };
        let (done, ended) = sync_channel(1);
        let work = Work { body, done };
        let mut threads = lock(&self.threads);
        match &mut threads.device_jobs {
            DeviceJobs::Deferred(jobs) if role != Role::Vcpu => {
                jobs.push((worker.work.clone(), work));
            }
            _ => {
                let gone = |_| io::Error::other("an idle thread has exited");
                worker.work.send(work).map_err(gone)?;
            }
        }
        drop(threads);
        let threads = self.threads.clone();
        Ok(Job::new(move || {
            let gone = |_| Err(Box::new("the thread has exited") as Box<_>);
            let result = ended.recv().unwrap_or_else(gone);
            if result.is_ok() {
                lock(&threads).idle.push(worker);
            }
            result
        }))
    }

    fn take_idle(&self, role: Role, name: &str) -> Option<Idle> {
        let idle = &mut lock(&self.threads).idle;
        let fits = |idle: &Idle| idle.role == role && idle.name == name;
        let at = idle.iter().position(fits)?;
        Some(idle.swap_remove(at))
    }
}

impl Workers for ThreadStarter {
    fn spawn(
        &self,
        role: WorkerRole,
        name: &str,
        body: Box<dyn FnOnce() + Send>,
    ) -> io::Result<Job> {
        if thread::current().id() == self.main {
            self.for_device(role, name, body)
        } else {
            self.mailbox.request_thread(role, name, body)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    fn starter(idle: IdleThreads) -> ThreadStarter {
        ThreadStarter::new(Arc::new(Mailbox::new().unwrap()), Sandbox::Off, idle)
    }

    /// Runs a device's work, and returns the id of its thread.
    fn done_by(starter: &ThreadStarter, role: WorkerRole) -> ThreadId {
        let (tell, told) = mpsc::channel();
        let body = Box::new(move || tell.send(thread::current().id()).unwrap());
        let job = starter.spawn(role, "block", body).unwrap();
        job.join().unwrap();
        told.recv().unwrap()
    }

    #[test]
    fn a_thread_is_reused_for_jobs_of_its_role() {
        let starter = starter(IdleThreads::default());
        starter.start_device_jobs();
        let first = done_by(&starter, WorkerRole::Block);
        assert_eq!(done_by(&starter, WorkerRole::Block), first);
        assert_ne!(done_by(&starter, WorkerRole::BlockOnDemand), first);
        assert_eq!(done_by(&starter, WorkerRole::Block), first);
    }

    #[test]
    fn idle_threads_without_a_role_in_the_vm_are_ended() {
        let names = |needed: &[WorkerRole]| {
            let idle = IdleThreads::usual(Sandbox::Off).unwrap().keep(needed);
            let names = idle.0.into_iter().map(|idle| idle.name);
            names.collect::<Vec<_>>()
        };
        assert_eq!(names(&[]), ["vcpu 0"]);
        assert_eq!(names(&[WorkerRole::BlockOnDemand]), ["vcpu 0"]);
        let both = [WorkerRole::BlockOnDemand, WorkerRole::Block];
        assert_eq!(names(&both), ["vcpu 0", "block"]);
    }

    #[test]
    fn device_jobs_wait_to_begin_but_vcpu_jobs_do_not() {
        let starter = starter(IdleThreads::usual(Sandbox::Off).unwrap());
        let (tell, told) = mpsc::channel();
        let say = |what: &'static str| {
            let tell = tell.clone();
            move || tell.send(what).unwrap()
        };
        let device = Box::new(say("device"));
        let device = starter.spawn(WorkerRole::Vsock, "vsock", device).unwrap();
        let vcpu = say("vCPU");
        let vcpu = starter
            .for_vcpu("vcpu 0", Box::new(move |_| vcpu()))
            .unwrap();
        vcpu.join().unwrap();
        starter.start_device_jobs();
        device.join().unwrap();
        assert_eq!(told.try_iter().collect::<Vec<_>>(), ["vCPU", "device"]);
    }

    #[test]
    fn a_panicking_job_is_reported_and_its_thread_not_reused() {
        let starter = starter(IdleThreads::default());
        starter.start_device_jobs();
        let first = done_by(&starter, WorkerRole::Block);
        let bad = Box::new(|| panic!("on purpose"));
        let job = starter.spawn(WorkerRole::Block, "block", bad).unwrap();
        assert!(job.join().is_err());
        assert_ne!(done_by(&starter, WorkerRole::Block), first);
    }
}
