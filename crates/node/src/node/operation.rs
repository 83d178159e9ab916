//! Steps shared by pause, snapshot, fork and hibernation; and the clients they are done for.

use super::Node;
use super::limits::current_spec;
use jiffy_content::clock::monotonic_ns;
use jiffy_content::error::{Error, Result};
use jiffy_content::model::vm::MainState;
use jiffy_content::room::memory::{Amount, DEFAULT_OWNER, MAX_WAIT, Request, Reserved};
use jiffy_content::snapshots::captured::Captured;
use jiffy_content::snapshots::memory;
use jiffy_vmhost::capture::{self, FrozenGuest};
use jiffy_vmhost::control;
use jiffy_vmhost::handle::{Command, VmHandle};
use jiffy_wire::api::{Priority, Purpose, Vm, VmState};
use jiffy_wire::timeline::{Span, Timeline, Track, names};
use jiffy_wire::vmm::ControlRequest;
use std::cell::Cell;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// Measures the steps of an operation.
#[derive(Debug)]
pub(super) struct Stopwatch {
    timeline: Timeline,
}

impl Stopwatch {
    /// Starts now, when the request came.
    pub(super) fn start(clock: &str) -> Stopwatch {
        let mut timeline = Timeline::new(clock);
        let received = Span::moment(Track::Node, names::REQUEST_RECEIVED, monotonic_ns());
        timeline.spans.push(received);
        Stopwatch { timeline }
    }

    /// Times one step.
    pub(super) async fn step<T>(&mut self, name: &str, step: impl Future<Output = T>) -> T {
        let start = monotonic_ns();
        let result = step.await;
        self.span(Track::Node, name, start, monotonic_ns());
        result
    }

    /// Adds a step that was timed elsewhere.
    pub(super) fn span(&mut self, track: Track, name: &str, start_ns: u64, end_ns: u64) {
        let span = Span::new(track, name, start_ns, end_ns);
        self.timeline.spans.push(span);
    }

    /// The timeline of all steps.
    pub(super) fn stop(mut self) -> Timeline {
        self.timeline.sort();
        self.timeline
    }
}

/// Who sends a request, and how it waits for memory and vCPUs.
#[derive(Debug, Clone, Default)]
pub struct Caller {
    /// The owner of VMs that specify none.
    pub owner: Option<Arc<str>>,
    /// Priority of the request; overrides its VM's.
    pub priority: Option<Priority>,
    /// How long it may wait; overrides the node's setting.
    pub wait: Option<Duration>,
    /// The id that the client has given to the request, to follow its place in the queue.
    pub request: Option<Arc<str>>,
}

/// The client that an operation is done for.
#[derive(Debug, Clone, Default)]
struct Client {
    caller: Caller,
    /// Nothing is sent; the channel is closed when the client leaves.
    gone: Option<watch::Receiver<()>>,
    /// When its wait ends, once it has begun. Time spent waiting for another operation counts, too.
    until: Cell<Option<Instant>>,
}

tokio::task_local! {
    static CLIENT: Client;
}

/// Runs an operation for this caller.
pub fn on_behalf_of<T>(
    caller: Caller,
    operation: impl Future<Output = T>,
) -> impl Future<Output = T> {
    let client = Client {
        caller,
        ..Client::default()
    };
    CLIENT.scope(client, operation)
}

impl Caller {
    /// The caller of this operation.
    pub fn current() -> Caller {
        let current = CLIENT.try_with(|client| client.caller.clone());
        current.unwrap_or_default()
    }

    /// The same caller, with this priority and wait if they are given.
    ///
    /// # Errors
    ///
    /// If the wait is longer than a request may wait.
    pub fn with(self, priority: Option<Priority>, wait_s: Option<u32>) -> Result<Caller> {
        let wait = wait_s.map(|wait_s| Duration::from_secs(wait_s.into()));
        if let Some(wait) = wait.filter(|wait| *wait > MAX_WAIT) {
            return Err(Error::invalid(format!(
                "A request can't wait for {} s; choose 0 to {} s.",
                wait.as_secs(),
                MAX_WAIT.as_secs()
            )));
        }
        Ok(Caller {
            priority: priority.or(self.priority),
            wait: wait.or(self.wait),
            ..self
        })
    }

    /// The caller's request for resources of a VM.
    pub(super) fn request_for(self, vm: &VmHandle, purpose: Purpose) -> Request {
        let of_vm = vm.spec.owner.as_deref().map(Arc::from);
        Request {
            owner: of_vm.or(self.owner).unwrap_or_else(|| DEFAULT_OWNER.into()),
            priority: self.priority.unwrap_or(vm.spec.priority),
            wait: self.wait,
            id: vm.id.clone(),
            name: vm.name.clone(),
            purpose,
            request_id: self.request,
        }
    }
}

/// Runs an operation to its end even if the client leaves, so that a VM does not stay paused. Steps
/// that have not begun can be skipped: see [`client_gone`].
///
/// # Errors
///
/// That of the operation, or if it panicked.
pub async fn run_to_completion<T: Send + 'static>(
    operation: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    let (_client, client) = watch::channel(());
    join_result(tokio::spawn(for_clients(client, operation)).await)
}

/// As [`run_to_completion`], for an operation that many clients share: the channel is closed when
/// all have left. The first client is the caller.
pub(super) fn for_clients<T>(
    clients: watch::Receiver<()>,
    operation: impl Future<Output = T>,
) -> impl Future<Output = T> {
    let client = Client {
        caller: Caller::current(),
        gone: Some(clients),
        ..Client::default()
    };
    CLIENT.scope(client, operation)
}

/// Waits until the client of this operation has left; forever if the node itself started it.
pub(super) async fn client_gone() {
    let gone = CLIENT.try_with(|client| client.gone.clone());
    match gone.ok().flatten() {
        Some(mut gone) => _ = gone.changed().await,
        None => std::future::pending().await,
    }
}

/// When the wait of this operation's client ends. The wait lasts `wait` and begins with the first
/// call.
pub(super) fn wait_deadline(wait: Duration) -> Instant {
    let until = CLIENT.try_with(|client| {
        let until = client.until.get().unwrap_or_else(|| Instant::now() + wait);
        client.until.set(Some(until));
        until
    });
    until.unwrap_or_else(|_| Instant::now() + wait)
}

/// The rest of the client's wait; `None` if it has not begun.
pub(super) fn remaining_wait() -> Option<Duration> {
    let until = CLIENT.try_with(|client| client.until.get());
    let until = until.ok().flatten()?;
    Some(until.saturating_duration_since(Instant::now()))
}

/// The result of a spawned task; a panic becomes an error.
pub(super) fn join_result<T>(
    result: std::result::Result<Result<T>, tokio::task::JoinError>,
) -> Result<T> {
    result.unwrap_or_else(|error| {
        Err(Error::internal(format!(
            "A task of jiffyd did not finish: {error}."
        )))
    })
}

/// A captured VM; its guest's programs stay frozen while this is kept.
#[derive(Debug)]
pub(super) struct CapturedVm {
    pub(super) captured: Captured,
    pub(super) frozen: FrozenGuest,
}

impl Node {
    /// Pauses a VM's vCPUs.
    ///
    /// # Errors
    ///
    /// If the VM does not run or its VMM refuses, after which it runs on, or its record can't be
    /// saved.
    pub async fn pause(self: Arc<Self>, vm: Arc<VmHandle>) -> Result<Vm> {
        let one = self.operate_for_client(&vm).await?;
        if one.state == VmState::Paused {
            return Ok(vm.vm());
        }
        self.agent_socket(&vm).await?;
        let paused = async {
            self.order(&vm, "paused", ControlRequest::Pause).await?;
            vm.ask(|reply| Command::Paused(true, reply)).await?
        };
        if let Err(error) = paused.await {
            // A VM that is ending has to run to shut down.
            let _ = self.resume_vcpus(&vm).await;
            return Err(error);
        }
        self.saved(&vm).await?;
        Ok(vm.vm())
    }

    /// Resumes a VM's vCPUs.
    ///
    /// # Errors
    ///
    /// If the VM does not run, its VMM refuses, or its record can't be saved.
    pub async fn resume(self: Arc<Self>, vm: Arc<VmHandle>) -> Result<Vm> {
        let one = self.operate_for_client(&vm).await?;
        if one.state != VmState::Paused {
            // As with pause: resuming a running VM is no error, but a VM without vCPUs is.
            self.agent_socket(&vm).await?;
            return Ok(vm.vm());
        }
        self.order(&vm, "resumed", ControlRequest::Resume).await?;
        vm.ask(|reply| Command::Paused(false, reply)).await??;
        self.saved(&vm).await?;
        Ok(vm.vm())
    }

    /// Sends a command to a VM's VMM.
    pub(super) async fn order(
        &self,
        vm: &VmHandle,
        done: &str,
        order: ControlRequest,
    ) -> Result<()> {
        let socket = self.host.paths.control_socket(&vm.id);
        control::order(&socket, order).await.map_err(|why| {
            Error::vm_failed(format!("The VM {} could not be {done}: {why}.", vm.name))
        })
    }

    /// Saves the VM's record.
    async fn saved(&self, vm: &VmHandle) -> Result<()> {
        if vm.spec.remove {
            return Ok(());
        }
        vm.ask(Command::Save).await?
    }

    /// Refuses a VM that can't be captured now; returns the agent's socket.
    pub(super) async fn capturable(&self, vm: &VmHandle) -> Result<PathBuf> {
        if let Some(folder) = vm.spec.folders.iter().find(|folder| !folder.capture) {
            return Err(Error::wrong_state(format!(
                "The VM {} shares {} with this host, which a capture can't contain.",
                vm.name, folder.source
            ))
            .hint(format!(
                "Run it with -v {}:{}:capture if it may be captured without the folder's files, use a \
                 volume (--disk), or copy the files into the VM (jiffy cp).",
                folder.source, folder.mount
            )));
        }
        self.freezable(vm).await
    }

    /// Refuses a VM whose programs can't be frozen now; returns the agent's socket.
    pub(super) async fn freezable(&self, vm: &VmHandle) -> Result<PathBuf> {
        let socket = self.agent_socket(vm).await?;
        if matches!(vm.view.borrow().main, MainState::Ended(_)) {
            return Err(Error::wrong_state(format!(
                "The command of the VM {} has ended: the VM is stopping.",
                vm.name
            )));
        }
        if vm.spec.init.is_some() {
            return Err(Error::wrong_state(format!(
                "The VM {} has handed PID 1 to {}: its programs can't be frozen.",
                vm.name,
                vm.spec.init.as_deref().unwrap_or_default().join(" ")
            )));
        }
        Ok(socket)
    }

    /// Freezes a VM's programs and captures it. With `resume` its vCPUs are resumed afterwards;
    /// otherwise the caller resumes them, also after its own errors.
    pub(super) async fn quiesce_and_capture(
        &self,
        vm: &VmHandle,
        resume: bool,
        watch: &mut Stopwatch,
    ) -> Result<CapturedVm> {
        let socket = self.capturable(vm).await?;
        self.fill_memory(vm).await?;
        self.deflate_squeezed(vm).await;
        let frozen = self.quiesce(vm, &socket, false, watch).await?;
        let captured = self.capture(vm, resume, watch).await?;
        Ok(CapturedVm { captured, frozen })
    }

    /// Freezes a VM's programs.
    pub(super) async fn quiesce(
        &self,
        vm: &VmHandle,
        socket: &Path,
        drop_caches: bool,
        watch: &mut Stopwatch,
    ) -> Result<FrozenGuest> {
        vm.tell(Command::Deliver(true)).await;
        let frozen = watch
            .step(names::QUIESCE, capture::quiesce(socket, drop_caches))
            .await;
        vm.tell(Command::Deliver(false)).await;
        frozen.map_err(|why| capture_error(vm, &why))
    }

    /// Captures a VM whose programs are frozen.
    pub(super) async fn capture(
        &self,
        vm: &VmHandle,
        resume: bool,
        watch: &mut Stopwatch,
    ) -> Result<Captured> {
        let control = self.host.paths.control_socket(&vm.id);
        let ram = u64::from(vm.spec.ram_mib()) << 20;
        let captured = watch
            .step(names::CAPTURE, capture::capture(&control, resume, ram))
            .await;
        match captured {
            Ok(captured) => {
                let end = monotonic_ns();
                let start = end.saturating_sub(captured.pause_ns);
                watch.span(Track::Vmm, names::PAUSE, start, end);
                Ok(captured)
            }
            Err(why) => {
                // Its state is unknown, but it must not stay paused.
                let _ = self.resume_vcpus(vm).await;
                Err(capture_error(vm, &why))
            }
        }
    }

    /// Fills the VM's missing memory; that memory is reserved meanwhile.
    pub(super) async fn fill_memory(&self, vm: &VmHandle) -> Result<()> {
        let _room = self.reserve_missing_memory(vm).await?;
        self.complete(vm).await
    }

    /// Reserves memory for the missing pages of a VM, until they are filled. Called before its
    /// programs are frozen, because it may wait.
    pub(super) async fn reserve_missing_memory(&self, vm: &VmHandle) -> Result<Option<Reserved>> {
        let Some(paged) = vm.view.borrow().paged.clone() else {
            return Ok(None);
        };
        let filled = tokio::task::spawn_blocking(move || memory::filled_bytes(&paged.image));
        // The contents of an image that is partial or can't be read are unknown.
        let filled = filled.await.ok().and_then(|filled| filled.ok());
        let amount = Amount::to_complete(&current_spec(vm), filled);
        self.reserve_for_capture(vm, amount).await.map(Some)
    }

    /// Fills the VM's missing memory, without which it can't be captured. After that the VM needs
    /// no pager.
    pub(super) async fn complete(&self, vm: &VmHandle) -> Result<()> {
        if vm.view.borrow().paged.is_none() {
            return Ok(());
        }
        self.host.pager.complete(&vm.id).await.map_err(|why| {
            Error::vm_failed(format!(
                "The memory of the VM {} can't be read completely from the pager: {why}.",
                vm.name
            ))
        })?;
        let stats = self.host.pager.stats(&vm.id).await;
        vm.ask(|reply| Command::MemoryWhole(stats.map(|it| Box::new(it.into())), reply))
            .await
    }

    /// Resumes a paused VM. If that fails, the VM is shown as paused, and can be resumed or ended
    /// later.
    pub(super) async fn resume_vcpus(&self, vm: &VmHandle) -> Result<()> {
        let resume = || self.order(vm, "resumed", ControlRequest::Resume);
        if resume().await.is_ok() {
            return Ok(());
        }
        let again = resume().await;
        if again.is_err() {
            let _ = vm.ask(|reply| Command::Paused(true, reply)).await;
        }
        again
    }
}

/// Was the end of this VM requested, or is it over?
pub(super) fn is_over(vm: &VmHandle) -> bool {
    let state = vm.view.borrow().vm.state;
    matches!(state, VmState::Stopping | VmState::Exited)
}

pub(super) fn capture_error(vm: &VmHandle, why: &str) -> Error {
    if is_over(vm) {
        return Error::vm_failed(format!("The VM {} ended before it was captured.", vm.name));
    }
    Error::vm_failed(format!("The VM {} can't be captured: {why}.", vm.name))
}
