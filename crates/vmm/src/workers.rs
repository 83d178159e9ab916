//! Threads for devices, each in the sandbox of its role.

use crate::mailbox::{Mailbox, SpawnRequest};
use crate::sandbox::Sandbox;
use jiffy_devices::virtio::device::{WorkerRole, Workers};
use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle, ThreadId};

/// Bytes of stack; only what is touched is memory.
const STACK: usize = 256 << 10;

/// Starts device threads. Called on another thread than the one that made it
/// (the main one), it has that do it.
pub struct ThreadStarter {
    mailbox: Arc<Mailbox>,
    main: ThreadId,
    sandbox: Sandbox,
}

impl ThreadStarter {
    /// To be made on the main thread.
    pub fn new(mailbox: Arc<Mailbox>, sandbox: Sandbox) -> ThreadStarter {
        ThreadStarter {
            mailbox,
            main: thread::current().id(),
            sandbox,
        }
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
        thread::Builder::new()
            .name(name.to_owned())
            .stack_size(STACK)
            .spawn(move || match sandbox.enter(role.into()) {
                Ok(()) => body(),
                Err(error) => {
                    tracing::error!(%error, "a device's thread could not be confined");
                    std::process::abort();
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
