//! The handle through which other code observes a VM and sends commands to its task.

use crate::activity::Activity;
use crate::clients::Clients;
use crate::launch::Plan;
use crate::log;
use crate::memory_check::MemoryCheck;
use crate::single_flight::SingleFlight;
use crate::supervisor::InputPort;
use crate::timeline::PagerFaults;
use jiffy_content::error::{Error, Result};
pub use jiffy_content::model::vm::is_active;
use jiffy_content::model::vm::{Failure, MainState, Paged, Root, Spec};
use jiffy_content::room::memory::Reserved;
use jiffy_sys::mutex::lock;
use jiffy_wire::api::{Limits, NetworkPolicy, Vm, VmState};
use jiffy_wire::timeline::Timeline;
use jiffy_wire::vmm::{DiskLimit, NetLimit};
use std::fmt::{self, Debug, Formatter};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Mutex, MutexGuard, mpsc, oneshot, watch};

/// The published state of a VM.
#[derive(Debug, Clone)]
pub struct View {
    /// As the API shows it.
    pub vm: Vm,
    /// State of the first command.
    pub main: MainState,
    /// Its process id in the guest, once it was started.
    pub main_pid: Option<u32>,
    /// Why the VM ended, if abnormally.
    pub failure: Option<Failure>,
    /// Log position at which the last start began to write.
    pub log_start: u64,
    /// It was hibernated, and is not ready yet.
    pub wakes: bool,
    /// Why no output is accepted from the guest, if so.
    pub held_up: Option<String>,
    /// Its root file system, as of the last start.
    pub root: Option<Root>,
    /// The memory that the pager serves to it; `None` if its RAM is mapped from files.
    pub paged: Option<Paged>,
    /// The VM is being removed: its name will be free soon.
    pub leaving: bool,
    /// The VM is removed.
    pub removed: bool,
    /// Set if its record can't be read: why only its end can be requested.
    pub refusal: Option<Error>,
}

impl View {
    /// Does it have a VMM?
    pub fn is_active(&self) -> bool {
        is_active(self.vm.state)
    }

    /// Was it started, and has it not ended?
    pub fn lives(&self) -> bool {
        self.is_active() || self.vm.state == VmState::Hibernated
    }
}

/// A command to a VM's task. Large contents are boxed, because the mailbox of each VM, even of a
/// hibernated one, has room for 32.
#[derive(Debug)]
pub enum Command {
    /// Write the record to disk.
    Save(oneshot::Sender<Result<()>>),
    /// Replace its network policy.
    Policy(Box<NetworkPolicy>, oneshot::Sender<Result<()>>),
    /// Change its rate limits and its number of vCPUs. Answered with the limits of all its devices;
    /// if nothing is changed, only that.
    Limits(Box<Limits>, oneshot::Sender<Result<DeviceLimits>>),
    /// Change the memory that its programs may use, MiB. If it runs, what it gets was reserved; what
    /// it loses it has given up.
    Memory(u32, Option<Box<Reserved>>, oneshot::Sender<Result<()>>),
    /// Start the VMM. Answered once it is spawned.
    Start(Box<Plan>, oneshot::Sender<Result<()>>),
    /// Ask the guest to end; programs have this long after SIGTERM. Answered at once; the view
    /// shows the end.
    Stop(Duration, oneshot::Sender<Result<()>>),
    /// End the VM now. Answered at once.
    Kill(oneshot::Sender<Result<()>>),
    /// The user of `run` sent a signal before the command was started.
    Interrupt(i32),
    /// Remove it; with force even if it runs. Answered when it is removed.
    Remove(bool, oneshot::Sender<Result<()>>),
    /// A capture begins (true) or is over. While true, every acknowledgement is sent to the guest
    /// at once: the guest waits until its command's output is acknowledged.
    Deliver(bool),
    /// Its vCPUs were paused (true) or resumed.
    Paused(bool, oneshot::Sender<Result<()>>),
    /// All of its memory is in its VMM, so it no longer needs the pager. Carries the pager's fault
    /// statistics.
    MemoryWhole(Option<Box<PagerFaults>>, oneshot::Sender<()>),
    /// Its memory is on disk: end its VMM. Answered when the VMM has ended.
    Hibernate(oneshot::Sender<Result<()>>),
    /// Get the timeline.
    Timeline(oneshot::Sender<Timeline>),
    /// The daemon ends: write all unsaved state.
    Flush(oneshot::Sender<()>),
}

// Each VM's mailbox has room for 32 of them.
const _: () = assert!(size_of::<Command>() <= 32);

/// Access to a VM's task.
#[derive(Debug)]
pub struct VmHandle {
    /// Its id.
    pub id: String,
    /// Its name.
    pub name: String,
    /// Its specification.
    pub spec: Arc<Spec>,
    /// vsock context id.
    pub cid: u32,
    /// Its published state.
    pub view: watch::Receiver<View>,
    /// The end of its log, while it runs; 0 before it has run under this daemon.
    pub log_end: watch::Receiver<u64>,
    /// The attached clients.
    pub clients: Arc<Clients>,
    /// Counts its uses.
    pub activity: Arc<Activity>,
    /// Sends input to the first command, while it runs.
    pub input: watch::Receiver<Option<InputPort>>,
    /// Wakes it on demand, once for all who ask.
    pub waking: SingleFlight<Result<()>>,
    /// Whether the memory that it was hibernated with can be used.
    pub memory_check: MemoryCheck,
    /// See [`VmHandle::operate`].
    pub(crate) operation: Mutex<()>,
    pub(crate) operations: watch::Sender<Operations>,
    pub(crate) mailbox: mpsc::Sender<Command>,
    pub(crate) unbegun: Unbegun,
}

/// Begins the task of a VM that has nothing to do before it gets a command.
#[derive(Default)]
pub(crate) struct Unbegun(std::sync::Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl Debug for Unbegun {
    fn fmt(&self, to: &mut Formatter<'_>) -> fmt::Result {
        to.debug_tuple("Unbegun").finish_non_exhaustive()
    }
}

/// Current rate limits of a VM's devices, in the order of its VMM's configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Limits of each disk.
    pub disks: Vec<DiskLimit>,
    /// Limits of each network interface.
    pub nets: Vec<NetLimit>,
}

/// The right to start, pause, capture, hibernate or wake a VM.
#[derive(Debug)]
#[must_use = "the operation is over when this is dropped"]
pub struct Operation<'a> {
    /// The VM's state when the operation began; no other operation changes it, but the VM can
    /// still end at any time.
    pub state: VmState,
    _one: MutexGuard<'a, ()>,
}

/// The operations on a VM, as others observe them.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Operations {
    /// How many have begun.
    pub begun: u64,
    /// Whether it is being hibernated.
    pub hibernates: bool,
}

/// Marks a VM as being hibernated until this is dropped.
#[derive(Debug)]
pub struct HibernationMark<'a>(&'a VmHandle);

impl Drop for HibernationMark<'_> {
    fn drop(&mut self) {
        self.0.operations.send_modify(|it| it.hibernates = false);
    }
}

impl VmHandle {
    /// Waits until no other operation (start, pause, capture, hibernate, wake) is in progress.
    pub async fn operate(&self) -> Operation<'_> {
        self.operation_of(self.operation.lock().await)
    }

    /// As [`VmHandle::operate`]; `None` if another operation is in progress.
    pub fn try_operate(&self) -> Option<Operation<'_>> {
        let one = self.operation.try_lock().ok()?;
        Some(self.operation_of(one))
    }

    /// The operations that begin. An idle connection to the VM must be closed then: its memory may be
    /// captured.
    pub fn operations(&self) -> watch::Receiver<Operations> {
        self.operations.subscribe()
    }

    /// The number of operations that have begun.
    pub fn operations_begun(&self) -> u64 {
        self.operations.borrow().begun
    }

    fn operation_of<'a>(&'a self, one: MutexGuard<'a, ()>) -> Operation<'a> {
        self.operations.send_modify(|it| it.begun += 1);
        Operation {
            state: self.view.borrow().vm.state,
            _one: one,
        }
    }

    /// Marks it as being hibernated; [`VmHandle::hibernation_settled`] waits for the end of that.
    pub fn begin_hibernation(&self, _one: &Operation<'_>) -> HibernationMark<'_> {
        self.operations.send_modify(|it| it.hibernates = true);
        HibernationMark(self)
    }

    /// Waits while a hibernation is in progress.
    pub async fn hibernation_settled(&self) {
        if !self.operations.borrow().hibernates {
            return;
        }
        let mut operations = self.operations();
        // The handle owns the sender, so it is never closed.
        let _ = operations.wait_for(|it| !it.hibernates).await;
    }

    /// Waits until a wake that is in progress has succeeded or failed.
    pub async fn wake_settled(&self) {
        self.when(|view| !view.wakes).await;
    }

    /// Has its task begin with the first command.
    pub(crate) fn begin_when_asked(&self, begin: impl FnOnce() + Send + 'static) {
        *lock(&self.unbegun.0) = Some(Box::new(begin));
    }

    fn begin(&self) {
        let unbegun = lock(&self.unbegun.0).take();
        if let Some(begin) = unbegun {
            begin();
        }
    }

    /// Writes all unsaved state: the daemon ends.
    pub async fn flush(&self) {
        let has_begun = lock(&self.unbegun.0).is_none();
        if has_begun {
            let _ = self.ask(Command::Flush).await;
        }
    }

    /// Sends a command and waits for its answer.
    ///
    /// # Errors
    ///
    /// If the VM was removed.
    pub async fn ask<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Result<T> {
        let (reply, answer) = oneshot::channel();
        self.begin();
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
        self.begin();
        // The task of a removed VM does not exist any more.
        let _ = self.mailbox.send(command).await;
    }

    /// The end of its log, which is in this folder, if its view said before whether it `lives`.
    ///
    /// # Errors
    ///
    /// If the log can't be read.
    pub fn end_of_log(&self, lives: bool, folder: &Path) -> io::Result<u64> {
        let known = || Some(*self.log_end.borrow()).filter(|end| *end > 0);
        if !lives {
            return log::end_of(folder);
        }
        if let Some(end) = known() {
            return Ok(end);
        }
        // It sleeps since before this daemon began. If it wakes meanwhile, the end is known before its
        // guest writes, and the file may end with half a record after that.
        let end = log::end_of(folder);
        known().map_or(end, Ok)
    }

    /// Its state, as the API shows it.
    pub fn vm(&self) -> Vm {
        self.view.borrow().vm.clone()
    }

    /// Waits until the view satisfies `wanted`, or the VM is gone; returns the view.
    pub async fn when(&self, wanted: impl FnMut(&View) -> bool) -> View {
        let mut view = self.view.clone();
        let mut wanted = wanted;
        let seen = view
            .wait_for(|view| view.removed || wanted(view))
            .await
            .map(|view| view.clone());
        match seen {
            Ok(view) => view,
            // The task has ended; its last view remains.
            Err(_) => self.view.borrow().clone(),
        }
    }
}
