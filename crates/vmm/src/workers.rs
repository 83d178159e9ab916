//! Threads for devices, each in the sandbox of its role.

use crate::mailbox::{Mailbox, SpawnRequest};
use crate::sandbox::Sandbox;
use jiffy_devices::virtio::device::{WorkerRole, Workers};
use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle, ThreadId};

/// Bytes of stack; only what is touched is memory.
const STACK: usize = 256 << 10;

/// Holds device threads back until the guest has been entered once: what their
/// start costs is then not between a request and the first instruction of its
/// guest. Doorbells that ring meanwhile are heard later.
#[derive(Debug, Default)]
pub struct StartingLine {
    open: Mutex<bool>,
    opened: Condvar,
}

impl StartingLine {
    /// Lets all through, from now on.
    pub fn open(&self) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if !*open {
            *open = true;
            self.opened.notify_all();
        }
    }

    fn pass(&self) {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let passed = self.opened.wait_while(open, |open| !*open);
        drop(passed.unwrap_or_else(PoisonError::into_inner));
    }
}

/// Starts device threads. Called on another thread than the one that made it
/// (the main one), it has that do it.
pub struct ThreadStarter {
    mailbox: Arc<Mailbox>,
    main: ThreadId,
    sandbox: Sandbox,
    line: Arc<StartingLine>,
}

impl ThreadStarter {
    /// To be made on the main thread.
    pub fn new(mailbox: Arc<Mailbox>, sandbox: Sandbox) -> ThreadStarter {
        ThreadStarter {
            mailbox,
            main: thread::current().id(),
            sandbox,
            line: Arc::default(),
        }
    }

    /// Where the threads wait. To be opened when the guest runs, and before
    /// anything waits for a device to stop.
    pub fn line(&self) -> &StartingLine {
        &self.line
    }

    /// Does what another thread asked for. On the main thread.
    pub fn serve(&self, request: SpawnRequest) {
        request.answer(|role, name, body| self.start(role, name, body));
    }

    fn start(
        &self,
        role: WorkerRole,
        name: &str,
        body: Box<dyn FnOnce() + Send>,
    ) -> io::Result<JoinHandle<()>> {
        let sandbox = self.sandbox;
        let line = self.line.clone();
        thread::Builder::new()
            .name(name.to_owned())
            .stack_size(STACK)
            .spawn(move || {
                line.pass();
                match sandbox.enter(role.into()) {
                    Ok(()) => body(),
                    Err(error) => {
                        tracing::error!(%error, "a device's thread could not be confined");
                        std::process::abort();
                    }
                }
            })
    }
}

impl Workers for ThreadStarter {
    fn spawn(
        &self,
        role: WorkerRole,
        name: &str,
        body: Box<dyn FnOnce() + Send>,
    ) -> io::Result<JoinHandle<()>> {
        if thread::current().id() == self.main {
            self.start(role, name, body)
        } else {
            self.mailbox.request_thread(role, name, body)
        }
    }
}
