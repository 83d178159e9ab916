//! Messages from other threads to the main thread.

use crate::ending::Ending;
use jiffy_devices::virtio::device::{Job, WorkerRole};
use jiffy_sys::mutex::lock;
use std::io;
use std::sync::Mutex;
use std::sync::mpsc::{SyncSender, sync_channel};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// An event of another thread.
pub enum Notice {
    /// A vCPU has parked, or its thread is about to end.
    Parked,
    /// Work that the main thread waits for, on a thread of its own, has ended.
    WorkDone,
    /// The first vCPU is about to enter the guest for the first time.
    FirstRun {
        /// The time, CLOCK_MONOTONIC nanoseconds.
        at_ns: u64,
    },
    /// The guest has taken on its new identity, or has failed to.
    Gate {
        /// Whether it has.
        passed: bool,
    },
    /// A vCPU can't continue.
    Ended(Ending),
    /// A device needs a thread.
    Spawn(SpawnRequest),
}

/// A request to start a device's thread. Only the main thread starts threads: a vCPU's sandbox
/// forbids it, and its threads would inherit that sandbox.
pub struct SpawnRequest {
    role: WorkerRole,
    name: String,
    body: Body,
    reply: SyncSender<io::Result<Job>>,
}

type Body = Box<dyn FnOnce() + Send>;

impl SpawnRequest {
    /// Starts the thread with `start` and answers the device, which waits for it.
    pub fn answer(self, start: impl FnOnce(WorkerRole, &str, Body) -> io::Result<Job>) {
        let thread = start(self.role, &self.name, self.body);
        // The device's vCPU is blocked on the other end.
        let _ = self.reply.send(thread);
    }
}

/// Notices for the main thread, and an event descriptor that is readable while there are any.
pub struct Mailbox {
    notices: Mutex<Vec<Notice>>,
    event: EventFd,
}

impl Mailbox {
    /// An empty mailbox.
    ///
    /// # Errors
    ///
    /// If the event descriptor can't be created.
    pub fn new() -> io::Result<Mailbox> {
        Ok(Mailbox {
            notices: Mutex::default(),
            event: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?,
        })
    }

    /// Appends a notice.
    pub fn push(&self, notice: Notice) {
        lock(&self.notices).push(notice);
        // Fails only if the counter is full, and then the descriptor is readable anyway.
        let _ = self.event.write(1);
    }

    /// Requests a thread from the main thread, and waits for it.
    ///
    /// # Errors
    ///
    /// If the main thread can't start it, or serves no requests any more.
    pub fn request_thread(&self, role: WorkerRole, name: &str, body: Body) -> io::Result<Job> {
        let (reply, answer) = sync_channel(1);
        self.push(Notice::Spawn(SpawnRequest {
            role,
            name: name.to_owned(),
            body,
            reply,
        }));
        answer
            .recv()
            .map_err(|_| io::Error::other("the VMM is ending"))?
    }

    /// Takes all notices.
    pub fn take(&self) -> Vec<Notice> {
        let _ = self.event.read();
        std::mem::take(&mut *lock(&self.notices))
    }

    /// Readable while there may be notices.
    pub fn event(&self) -> &EventFd {
        &self.event
    }
}
