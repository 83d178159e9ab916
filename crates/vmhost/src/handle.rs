//! The handle by which others see a VM and talk to its task.

use crate::clients::Clients;
use crate::launch::Plan;
use crate::supervisor::InputPort;
use crate::timeline::PagerFaults;
use jiffy_content::error::{Error, Result};
pub use jiffy_content::model::vm::is_active;
use jiffy_content::model::vm::{Failure, MainState, Paged, Root, Spec};
use jiffy_wire::api::{NetworkPolicy, Vm, VmState};
use jiffy_wire::timeline::Timeline;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Mutex, MutexGuard, mpsc, oneshot, watch};

/// What everybody may see of a VM; published by its task.
#[derive(Debug, Clone)]
pub struct View {
    /// As the API shows it.
    pub vm: Vm,
    /// What became of the first command.
    pub main: MainState,
    /// Its process id in the guest, once it was started.
    pub main_pid: Option<u32>,
    /// Why the VM ended out of order.
    pub failure: Option<Failure>,
    /// Position in the log of what the last start wrote.
    pub log_start: u64,
    /// Why output waits, if it does.
    pub held_up: Option<String>,
    /// What its root file system is.
    pub root: Option<Root>,
    /// Who serves its memory, if it is not mapped.
    pub paged: Option<Paged>,
    /// The VM is on its way out for good: its name will be free soon.
    pub leaving: bool,
    /// The VM is gone.
    pub removed: bool,
    /// Why nothing can be asked of it but its end: its record can't be read.
    pub refusal: Option<Error>,
}

impl View {
    /// Has it a VMM?
    pub fn is_active(&self) -> bool {
        is_active(self.vm.state)
    }

    /// Has it begun, and not ended?
    pub fn lives(&self) -> bool {
        self.is_active() || self.vm.state == VmState::Hibernated
    }
}

/// What a VM's task is asked to do.
#[derive(Debug)]
pub enum Command {
    /// Write the record to disk.
    Save(oneshot::Sender<Result<()>>),
    /// It may reach this on the network, and nothing else beside what all may.
    Policy(NetworkPolicy, oneshot::Sender<Result<()>>),
    /// Start the VMM. Answered once it is spawned.
    Start(Box<Plan>, oneshot::Sender<Result<()>>),
    /// End the guest in order; this long for programs after SIGTERM.
    /// Answered at once; the end shows in the view.
    Stop(Duration, oneshot::Sender<Result<()>>),
    /// End the VM now. Answered at once.
    Kill(oneshot::Sender<Result<()>>),
    /// The user of `run` sent a signal before there was a program to get it.
    Interrupt(i32),
    /// Remove it; with force even if it runs. Answered when it is gone.
    Remove(bool, oneshot::Sender<Result<()>>),
    /// The guest wants to be still, and waits until all that its command wrote
    /// is acknowledged (true); or no longer.
    Deliver(bool),
    /// Its vCPUs were stopped (true) or go on again.
    Paused(bool, oneshot::Sender<Result<()>>),
    /// All of its memory is with its VMM: no pager is needed any more. This is
    /// what the pager did.
    MemoryWhole(Option<PagerFaults>, oneshot::Sender<()>),
    /// Its memory is on disk: end its VMM. Answered when that is gone.
    Hibernate(oneshot::Sender<Result<()>>),
    /// What was measured.
    Timeline(oneshot::Sender<Timeline>),
    /// The daemon ends: write down what isn't yet.
    Flush(oneshot::Sender<()>),
}

/// The way to a VM's task.
#[derive(Debug)]
pub struct VmHandle {
    /// Its id.
    pub id: String,
    /// Its name.
    pub name: String,
    /// What it is made of.
    pub spec: Arc<Spec>,
    /// vsock context id.
    pub cid: u32,
    /// What it shows.
    pub view: watch::Receiver<View>,
    /// Where its log ends, while it runs.
    pub log_end: watch::Receiver<u64>,
    /// Who is attached.
    pub clients: Arc<Clients>,
    /// The way to the first command's input, while there is one.
    pub input: watch::Receiver<Option<InputPort>>,
    /// See [`VmHandle::operate`].
    pub(crate) operation: Mutex<()>,
    /// It is being hibernated.
    pub(crate) falls_asleep: watch::Sender<bool>,
    pub(crate) mailbox: mpsc::Sender<Command>,
}

/// The right to start, pause, capture, hibernate or wake a VM.
#[derive(Debug)]
#[must_use = "the operation is over when this is dropped"]
pub struct Operation<'a> {
    /// The VM's state now that nothing else is done to it. What was seen before
    /// may be out of date; it can still end at any time.
    pub state: VmState,
    _one: MutexGuard<'a, ()>,
}

/// A VM is being hibernated as long as this is kept.
#[derive(Debug)]
pub struct FallingAsleep<'a>(&'a VmHandle);

impl Drop for FallingAsleep<'_> {
    fn drop(&mut self) {
        self.0.falls_asleep.send_replace(false);
    }
}

impl VmHandle {
    /// Waits until nobody else starts, pauses, captures, hibernates or wakes it.
    pub async fn operate(&self) -> Operation<'_> {
        let one = self.operation.lock().await;
        Operation {
            state: self.view.borrow().vm.state,
            _one: one,
        }
    }

    /// Whoever wants to use it waits from now on until it sleeps, or does not.
    pub fn fall_asleep(&self, _one: &Operation<'_>) -> FallingAsleep<'_> {
        self.falls_asleep.send_replace(true);
        FallingAsleep(self)
    }

    /// Waits while it is being hibernated.
    pub async fn settled(&self) {
        // The sender is this handle's own.
        let _ = self.falls_asleep.subscribe().wait_for(|falls| !falls).await;
    }

    /// Sends a command and waits for its answer.
    pub async fn ask<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Result<T> {
        let (reply, answer) = oneshot::channel();
        if self.mailbox.send(command(reply)).await.is_ok()
            && let Ok(answer) = answer.await
        {
            return Ok(answer);
        }
        Err(Error::not_found(format!(
            "The VM {} was removed.",
            self.name
        )))
    }

    /// Sends a command that has no answer.
    pub async fn tell(&self, command: Command) {
        // A VM that is gone needs no telling.
        let _ = self.mailbox.send(command).await;
    }

    /// What it shows now.
    pub fn vm(&self) -> Vm {
        self.view.borrow().vm.clone()
    }

    /// Waits until the view is as wanted, or the VM is gone; gives the view.
    pub async fn when(&self, wanted: impl FnMut(&View) -> bool) -> View {
        let mut view = self.view.clone();
        let mut wanted = wanted;
        let seen = view
            .wait_for(|view| view.removed || wanted(view))
            .await
            .map(|view| view.clone());
        match seen {
            Ok(view) => view,
            // The task is gone; its last words remain.
            Err(_) => self.view.borrow().clone(),
        }
    }
}
