//! What other threads tell the main thread.

use crate::ending::Ending;
use jiffy_devices::virtio::device::{Job, WorkerRole};
use std::io;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Something happened on another thread.
pub enum Notice {
    /// A vCPU has parked, or its thread is about to end.
    Parked,
    /// What was done aside is done.
    DoneAside,
    /// The first vCPU is about to enter the guest for the first time.
    FirstRun {
        /// When, CLOCK_MONOTONIC nanoseconds.
        at_ns: u64,
    },
    /// The guest has taken on its new identity, or could not.
    Gate {
        /// It has.
        passed: bool,
    },
    /// A vCPU can't go on.
    Ended(Ending),
    /// A device wants a thread.
    Spawn(SpawnRequest),
}

/// A device wants a thread. Only the main thread starts threads: a vCPU's
/// sandbox does not let it, and its threads would inherit that sandbox.
pub struct SpawnRequest {
    role: WorkerRole,
    name: String,
    body: Body,
    reply: SyncSender<io::Result<Job>>,
}

type Body = Box<dyn FnOnce() + Send>;

impl SpawnRequest {
    /// Starts the thread by `start` and tells the device, which waits for it.
    pub fn answer(self, start: impl FnOnce(WorkerRole, &str, Body) -> io::Result<Job>) {
        let thread = start(self.role, &self.name, self.body);
        // The device's vCPU is blocked on the other end.
        let _ = self.reply.send(thread);
    }
}

/// Notices for the main thread, and the descriptor that tells of them.
pub struct Mailbox {
    notices: Mutex<Vec<Notice>>,
    bell: EventFd,
}

impl Mailbox {
    /// An empty one.
    pub fn new() -> io::Result<Mailbox> {
        Ok(Mailbox {
            notices: Mutex::default(),
            bell: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?,
        })
    }

    /// Leaves a notice.
    pub fn push(&self, notice: Notice) {
        self.notices
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(notice);
        // Fails only if the counter is full, and then it is readable.
        let _ = self.bell.write(1);
    }

    /// Asks the main thread for a thread, and waits for it.
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
        let _ = self.bell.read();
        std::mem::take(&mut *self.notices.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Readable while there may be notices.
    pub fn bell(&self) -> &EventFd {
        &self.bell
    }
}
