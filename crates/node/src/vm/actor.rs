//! The task that owns one VM.
//!
//! It sleeps until something happens: a command, an event of the VMM, a
//! message of the guest, the VMM's end, a deadline. Nothing it does waits for
//! a guest or a client; only small files are written in place.

use crate::clock::unix_seconds;
use crate::error::{Error, Result};
use crate::node::Settings;
use crate::registry::Registry;
use crate::vm::end::EndReason;
use crate::vm::log::{Clients, Kind, Writer};
use crate::vm::process::{Ended, Events, VmmProcess};
use crate::vm::record::{MAX_WARNINGS, MainEnd, MainState, VmRecord};
use crate::vm::start::{self, Prepared};
use crate::vm::stop::Stopping;
use crate::vm::supervisor::{FromLink, InputPort, Link, Stored, Supervisor};
use crate::vm::timeline::{Recorder, short};
use crate::vm::{Command, View, VmHandle, is_active};
use jiffy_wire::agent::{ExitStatus, FromGuest, Stream, ToGuest, VERSION};
use jiffy_wire::api::VmState;
use jiffy_wire::timeline::Timeline;
use jiffy_wire::vmm::VmmEvent;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};
use tracing::{debug, info, warn};

/// Output of a stream that may be stored without telling the guest, which
/// keeps it until told; a quarter of what the guest can keep.
const ACKNOWLEDGE_EVERY: u64 = jiffy_wire::agent::MAIN_OUTPUT_WINDOW as u64 / 4;
/// How often storing output is tried again while the disk is full.
const RETRY_STORING: Duration = Duration::from_secs(1);
/// Commands that wait for the task.
const MAILBOX: usize = 16;

/// A VM's task.
pub(super) struct Actor {
    pub(super) settings: Arc<Settings>,
    pub(super) registry: Arc<Registry>,
    pub(super) record: VmRecord,
    pub(super) view: watch::Sender<View>,
    pub(super) log_end: watch::Sender<u64>,
    pub(super) input: watch::Sender<Option<InputPort>>,
    pub(super) clients: Arc<Clients>,
    pub(super) mailbox: mpsc::Receiver<Command>,
    pub(super) running: Option<Running>,
    pub(super) recorder: Recorder,
    pub(super) saver: Saver,
    /// Somebody asked for removal; with force it does not wait for clients.
    pub(super) removal: Vec<oneshot::Sender<Result<()>>>,
    pub(super) removed: bool,
    /// The record on disk can't be read and is never written over.
    pub(super) unreadable: bool,
}

/// What a VM has while its VMM lives.
pub(super) struct Running {
    pub(super) process: VmmProcess,
    pub(super) events: Option<Events>,
    pub(super) supervisor: Supervisor,
    pub(super) link: Option<Link>,
    pub(super) log: Writer,
    /// Output that could not be stored, to be tried again.
    pub(super) unstored: Option<(Kind, Vec<u8>)>,
    pub(super) retry_at: Option<Instant>,
    pub(super) acknowledged: Stored,
    pub(super) deadline: Option<Instant>,
    pub(super) stopping: Option<Stopping>,
    pub(super) ended: Option<Ended>,
    pub(super) adopted: bool,
    pub(super) notices: mpsc::UnboundedReceiver<Notice>,
    pub(super) notify: mpsc::UnboundedSender<Notice>,
    /// Held while the VM runs.
    pub(super) _volumes: Vec<crate::volumes::Lease>,
}

/// What helper tasks of a VM report back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Notice {
    /// The agent didn't take the request to shut down.
    ShutdownRefused,
    /// The VMM didn't take the request to stop.
    ControlRefused,
    /// The agent of an adopted VM answers.
    AgentAnswers,
}

/// What woke the task.
enum Event {
    Command(Option<Command>),
    Saved(io::Result<()>),
    VmmEvents,
    Link(FromLink),
    ProcessEnded(Ended),
    Deadline,
    RetryStoring,
    ClientsMoved,
    Notice(Notice),
}

/// Writes the record in the background, the newest only.
#[derive(Default)]
pub(super) struct Saver {
    writing: Option<JoinHandle<io::Result<()>>>,
    dirty: bool,
    waiting: Vec<oneshot::Sender<Result<()>>>,
    written_for: Vec<oneshot::Sender<Result<()>>>,
}

impl Saver {
    async fn done(&mut self) -> io::Result<()> {
        match &mut self.writing {
            Some(writing) => {
                let result = writing.await;
                self.writing = None;
                result.unwrap_or_else(|error| Err(io::Error::other(error)))
            }
            None => std::future::pending().await,
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.writing.is_none() && !self.dirty
    }
}

/// A VM and its way in. The task starts with [`Actor::run`].
pub(super) fn new(
    settings: Arc<Settings>,
    registry: Arc<Registry>,
    record: VmRecord,
    unreadable: bool,
) -> (Actor, Arc<VmHandle>) {
    let (mailbox_in, mailbox) = mpsc::channel(MAILBOX);
    let (view, view_out) = watch::channel(view_of(&record));
    let (log_end, log_end_out) = watch::channel(0);
    let (input, input_out) = watch::channel(None);
    let clients = Arc::new(Clients::default());
    let handle = Arc::new(VmHandle {
        id: record.id.clone(),
        name: record.name.clone(),
        spec: Arc::new(record.spec.clone()),
        cid: record.cid,
        view: view_out,
        log_end: log_end_out,
        clients: Arc::clone(&clients),
        input: input_out,
        mailbox: mailbox_in,
    });
    let actor = Actor {
        recorder: Recorder::new(&settings.clock),
        settings,
        registry,
        record,
        view,
        log_end,
        input,
        clients,
        mailbox,
        running: None,
        saver: Saver::default(),
        removal: Vec::new(),
        removed: false,
        unreadable,
    };
    (actor, handle)
}

/// Makes a VM's task and starts it.
pub fn create(
    settings: Arc<Settings>,
    registry: Arc<Registry>,
    record: VmRecord,
    unreadable: bool,
) -> Arc<VmHandle> {
    let (actor, handle) = new(settings, registry, record, unreadable);
    tokio::spawn(actor.run());
    handle
}

fn view_of(record: &VmRecord) -> View {
    View {
        vm: record.view(),
        main: record.main.clone(),
        main_pid: record.main_pid,
        failure: record.failure.clone(),
        log_start: record.log_start,
        held_up: None,
        leaving: record.spec.remove
            && (record.state == VmState::Exited || matches!(record.main, MainState::Ended(_))),
        removed: false,
    }
}

impl Actor {
    /// Lives until the VM is removed or the daemon ends.
    pub(super) async fn run(mut self) {
        loop {
            self.finish_if_over();
            self.forget_if_over();
            self.write_record();
            if self.removed {
                return;
            }
            match self.next().await {
                Event::Command(None) => return,
                Event::Command(Some(command)) => self.command(command),
                Event::Saved(result) => self.saved(result),
                Event::VmmEvents => self.vmm_events(),
                Event::Link(message) => self.link(message),
                Event::ProcessEnded(how) => self.process_ended(how),
                Event::Deadline => self.deadline(),
                Event::RetryStoring => self.store_again(),
                Event::ClientsMoved => {}
                Event::Notice(notice) => self.notice(notice),
            }
        }
    }

    async fn next(&mut self) -> Event {
        let held_up = self.is_held_up();
        let clients_matter = held_up || !is_active(self.record.state);
        let mailbox = &mut self.mailbox;
        let saver = &mut self.saver;
        let clients = &self.clients;
        let running = &mut self.running;
        tokio::select! {
            biased;
            command = mailbox.recv() => Event::Command(command),
            event = async {
                match running {
                    Some(running) => running.next(held_up).await,
                    None => std::future::pending().await,
                }
            } => event,
            result = saver.done() => Event::Saved(result),
            () = clients.progress.notified(), if clients_matter => Event::ClientsMoved,
        }
    }

    /// Must the guest wait before more of its output is taken?
    fn is_held_up(&self) -> bool {
        self.running.as_ref().is_some_and(|running| {
            running.unstored.is_some() || self.clients.lag(running.log.end())
        })
    }

    fn command(&mut self, command: Command) {
        match command {
            Command::Save(reply) => {
                self.saver.waiting.push(reply);
                self.changed();
            }
            Command::Start(prepared, reply) => {
                let _ = reply.send(self.start(*prepared));
            }
            Command::Stop(grace, reply) => {
                let _ = reply.send(self.stop(grace));
            }
            Command::Kill(reply) => {
                let _ = reply.send(self.kill(EndReason::Killed));
            }
            Command::Interrupt(signal) => self.interrupt(signal),
            Command::Remove(force, reply) => self.remove(force, reply),
            Command::Timeline(reply) => {
                let _ = reply.send(self.timeline());
            }
            Command::Flush(reply) => {
                if !self.unreadable && is_active(self.record.state) {
                    self.save_timeline();
                    let _ = self.record.save(&self.folder());
                }
                let _ = reply.send(());
            }
        }
    }

    pub(super) fn folder(&self) -> std::path::PathBuf {
        self.settings.paths.vm(&self.record.id)
    }

    // ---- start -----------------------------------------------------------

    fn start(&mut self, prepared: Prepared) -> Result<()> {
        let name = &self.record.name;
        if self.unreadable {
            return Err(Error::wrong_state(format!(
                "The VM {name} can't be started: its record can't be read."
            )));
        }
        if is_active(self.record.state) {
            return Err(Error::wrong_state(format!("The VM {name} already runs.")));
        }
        if !self.removal.is_empty() || (self.record.spec.remove && self.record.ended.is_some()) {
            return Err(Error::wrong_state(format!(
                "The VM {name} is being removed."
            )));
        }
        let started = self.try_start(prepared);
        if started.is_err() {
            let _ = std::fs::remove_dir_all(self.settings.paths.vm_run(&self.record.id));
        }
        started
    }

    fn try_start(&mut self, prepared: Prepared) -> Result<()> {
        let folder = self.folder();
        let log = match self.record.started {
            None => Writer::create(&folder),
            Some(_) => Writer::open(&folder),
        };
        let (log, log_start) = log
            .and_then(|mut log| log.begin().map(|start| (log, start)))
            .map_err(|error| Error::io("write the command's log", &folder, &error))?;
        let spawned = start::spawn(&self.settings.paths, &self.record, &prepared)?;
        let mut recorder = Recorder::new(&self.settings.clock);
        recorder.received(prepared.received_ns);
        recorder.image_ready(prepared.lookup_ns, prepared.ready_ns);
        recorder.spawned(spawned.spawn_ns.0, spawned.spawn_ns.1);
        self.recorder = recorder;
        let record = &mut self.record;
        record.state = VmState::Starting;
        record.started = Some(unix_seconds());
        record.ended = None;
        record.pid = Some(spawned.process.pid);
        record.main = MainState::Pending;
        record.main_pid = None;
        record.failure = None;
        record.warnings.clear();
        record.log_start = log_start;
        let running = Running::new(
            spawned.process,
            Some(spawned.events),
            Supervisor::new(spawned.listener, &record.id),
            log,
            Instant::now() + self.settings.start_timeout,
            prepared.volumes,
        );
        info!(vm = %record.name, id = %record.id, pid = ?record.pid, "VM starting");
        self.log_end.send_replace(running.log.end());
        self.running = Some(running);
        self.changed();
        Ok(())
    }

    // ---- the VMM ---------------------------------------------------------

    pub(super) fn vmm_events(&mut self) {
        let Some(running) = &mut self.running else {
            return;
        };
        let Some(events) = &mut running.events else {
            return;
        };
        let (events, closed) = events.drain();
        if closed {
            running.events = None;
        }
        for event in events {
            match event {
                VmmEvent::Span {
                    name,
                    start_ns,
                    end_ns,
                } => self.recorder.vmm_span(name, start_ns, end_ns),
                VmmEvent::Mark { value, at_ns } => self.recorder.mark(value, at_ns),
                // exit.json says the same, and is there for adopted VMs too.
                VmmEvent::Exited(_) => {}
            }
        }
    }

    fn process_ended(&mut self, how: Ended) {
        if let Some(running) = &mut self.running {
            debug!(vm = %self.record.name, ?how, "the VMM ended");
            running.ended = Some(how);
            running.deadline = None;
        }
    }

    /// The VM is over when its VMM is gone and all that its guest said is
    /// taken in: what is in the connection outlives the VMM.
    fn finish_if_over(&mut self) {
        let over = self.running.as_ref().is_some_and(|running| {
            running.ended.is_some()
                && running.unstored.is_none()
                && running.link.is_none()
                && running.supervisor.messages.is_empty()
        });
        if over {
            self.vmm_events();
            self.finish();
        }
    }

    fn deadline(&mut self) {
        let Some(running) = &mut self.running else {
            return;
        };
        running.deadline = None;
        if running.stopping.is_some() {
            self.escalate();
        } else if self.record.state == VmState::Starting {
            warn!(vm = %self.record.name, "the guest wasn't ready in time");
            let _ = self.kill(EndReason::StartTimeout);
        }
    }

    fn notice(&mut self, notice: Notice) {
        match notice {
            Notice::AgentAnswers => self.ready(),
            Notice::ShutdownRefused => self.escalate_from_agent(),
            Notice::ControlRefused => self.escalate_from_control(),
        }
    }

    // ---- the guest -------------------------------------------------------

    fn link(&mut self, message: FromLink) {
        match message {
            FromLink::Hello {
                link,
                pid1_ns,
                attempt,
            } => self.hello(link, pid1_ns, attempt),
            FromLink::Message(serial, message) => {
                let current = self
                    .running
                    .as_ref()
                    .and_then(|running| running.link.as_ref());
                if current.is_some_and(|link| link.serial == serial) {
                    self.guest(message);
                }
            }
            FromLink::Gone(serial) => {
                if let Some(running) = &mut self.running
                    && running
                        .link
                        .as_ref()
                        .is_some_and(|link| link.serial == serial)
                {
                    running.link = None;
                    self.input.send_replace(None);
                }
            }
        }
    }

    fn hello(&mut self, link: Link, pid1_ns: u64, attempt: u32) {
        let Some(running) = &mut self.running else {
            return;
        };
        debug!(vm = %self.record.name, attempt, "the guest's init connected");
        self.recorder.pid1_guest(pid1_ns);
        let offset = |stream| running.log.offset(stream);
        let welcome = ToGuest::Welcome {
            version: VERSION,
            stdout_offset: offset(Stream::Stdout),
            stderr_offset: offset(Stream::Stderr),
        };
        // The queue of a new link is empty.
        let _ = link.send.try_send(welcome);
        let stored = Stored {
            stdout: offset(Stream::Stdout),
            stderr: offset(Stream::Stderr),
            end: matches!(self.record.main, MainState::Ended(_)) && self.saver.is_idle(),
        };
        running.acknowledged = stored;
        if stored.end {
            link.stored.send_replace(stored);
        }
        running.link = Some(link);
        if running.adopted && self.record.state == VmState::Starting {
            // Its `Ready` may have been for the daemon before this one.
            self.probe_agent();
        }
    }

    fn guest(&mut self, message: FromGuest) {
        match message {
            // A second hello on one connection has no meaning.
            FromGuest::Hello { .. } => {}
            FromGuest::Spans(spans) => self.recorder.guest_spans(spans),
            FromGuest::Warning { step, message } => {
                self.warning(&format!("{}: {}", short(&step), short(&message)));
            }
            FromGuest::Ready => {
                self.recorder.heard_ready();
                self.ready();
            }
            FromGuest::MainStarted { pid } => {
                self.recorder.heard_started();
                if self.record.main == MainState::Pending {
                    self.record.main = MainState::Started;
                    self.record.main_pid = Some(pid);
                    self.changed();
                }
                // Said anew on each connection, after how much room there is.
                self.offer_input();
            }
            FromGuest::MainFailed(error) => {
                self.recorder.heard_ended();
                self.main_ended(MainEnd::Failed(error));
            }
            FromGuest::MainOutput {
                stream,
                offset,
                data,
            } => self.output(stream, offset, data),
            FromGuest::MainExited(status) => {
                self.recorder.heard_ended();
                self.main_ended(MainEnd::Exited(status));
            }
            FromGuest::ServiceLog { name, line } => {
                let line = String::from_utf8_lossy(&line);
                let note = format!("[{}] {line}\n", short(&name));
                self.note(&note);
            }
            FromGuest::PoweringOff => {
                self.record.state = VmState::Stopping;
                self.publish();
            }
            FromGuest::MainInputRoom { bytes } => {
                if let Some(running) = &mut self.running
                    && let Some(link) = &mut running.link
                {
                    link.more_room(bytes);
                }
            }
        }
    }

    pub(super) fn ready(&mut self) {
        if self.record.state != VmState::Starting {
            return;
        }
        info!(vm = %self.record.name, "VM ready");
        self.record.state = VmState::Running;
        if let Some(running) = &mut self.running
            && running.stopping.is_none()
        {
            running.deadline = None;
        }
        self.changed();
    }

    fn warning(&mut self, text: &str) {
        info!(vm = %self.record.name, warning = text, "the guest's init warned");
        if self.record.warnings.len() < MAX_WARNINGS {
            self.record.warnings.push(text.to_owned());
            self.changed();
        }
        self.note(&format!("[init] {text}\n"));
    }

    /// Notes are worth less than output: what can't be stored is dropped.
    fn note(&mut self, text: &str) {
        if let Some(running) = &mut self.running {
            let bytes = text.as_bytes();
            let end = bytes.len().min(jiffy_wire::frame::MAX_DATA);
            if let Ok(end) = running.log.append(Kind::Note, &bytes[..end]) {
                self.log_end.send_replace(end);
            }
        }
    }

    fn output(&mut self, stream: Stream, offset: u64, data: Vec<u8>) {
        let Some(running) = &mut self.running else {
            return;
        };
        let stored = running.log.offset(stream);
        let repeated = stored.saturating_sub(offset);
        if offset > stored || data.len() > jiffy_wire::frame::MAX_DATA {
            warn!(vm = %self.record.name, "the guest left out some output; its connection is closed");
            running.link = None;
            self.input.send_replace(None);
            return;
        }
        if repeated >= data.len() as u64 {
            return;
        }
        let fresh = data[repeated as usize..].to_vec();
        self.store(Kind::Output(stream), fresh);
    }

    fn store(&mut self, kind: Kind, data: Vec<u8>) {
        let Some(running) = &mut self.running else {
            return;
        };
        match running.log.append(kind, &data) {
            Ok(end) => {
                running.unstored = None;
                let stored = Stored {
                    stdout: running.log.offset(Stream::Stdout),
                    stderr: running.log.offset(Stream::Stderr),
                    ..running.acknowledged
                };
                let told = running.acknowledged;
                if stored.stdout - told.stdout >= ACKNOWLEDGE_EVERY
                    || stored.stderr - told.stderr >= ACKNOWLEDGE_EVERY
                {
                    running.acknowledge(stored);
                }
                self.log_end.send_replace(end);
            }
            Err(error) => {
                let why = Error::io("store the command's output", &self.folder(), &error)
                    .0
                    .message;
                if let Some(running) = &mut self.running {
                    running.unstored = Some((kind, data));
                    running.retry_at = Some(Instant::now() + RETRY_STORING);
                }
                self.hold_up(Some(why));
            }
        }
    }

    fn store_again(&mut self) {
        let Some(running) = &mut self.running else {
            return;
        };
        running.retry_at = None;
        if let Some((kind, data)) = running.unstored.take() {
            self.store(kind, data);
        }
        if self
            .running
            .as_ref()
            .is_some_and(|running| running.unstored.is_none())
        {
            self.hold_up(None);
        }
    }

    fn hold_up(&mut self, why: Option<String>) {
        self.view.send_if_modified(|view| {
            let changed = view.held_up != why;
            if changed && let Some(why) = &why {
                tracing::error!(vm = %view.vm.name, "{why} The VM's output waits.");
            }
            view.held_up = why;
            changed
        });
    }

    fn main_ended(&mut self, end: MainEnd) {
        if matches!(self.record.main, MainState::Ended(_)) {
            return;
        }
        self.record.main = MainState::Ended(end);
        if self.record.spec.command.is_some() {
            // Init powers off once it knows that the end is stored.
            self.record.state = VmState::Stopping;
            if let Some(running) = &mut self.running
                && running.stopping.is_none()
            {
                running.deadline = None;
            }
        }
        self.input.send_replace(None);
        self.changed();
    }

    /// Gives attached clients the way to the command's input, once it runs.
    fn offer_input(&self) {
        let link = self
            .running
            .as_ref()
            .and_then(|running| running.link.as_ref());
        if let Some(link) = link
            && matches!(self.record.main, MainState::Started)
        {
            self.input.send_replace(Some(link.input()));
        }
    }

    /// Ctrl-C before there is a program to send it to ends the VM, as it
    /// would have ended the program.
    fn interrupt(&mut self, signal: i32) {
        if self.record.main == MainState::Pending && is_active(self.record.state) {
            self.record.main = MainState::Ended(MainEnd::Exited(ExitStatus::Signal(signal)));
            self.changed();
            let _ = self.kill(EndReason::Interrupted(signal));
        }
    }

    // ---- keeping ---------------------------------------------------------

    fn timeline(&mut self) -> Timeline {
        self.vmm_events();
        if self.running.is_none()
            && let Some(kept) = self.kept_timeline()
        {
            return kept;
        }
        self.recorder.build()
    }

    /// Shows the record as it is now.
    pub(super) fn publish(&self) {
        let mut view = view_of(&self.record);
        view.leaving |= !self.removal.is_empty();
        self.view.send_modify(|old| {
            view.held_up = old.held_up.take();
            *old = view;
        });
    }

    /// Shows the record, and has it written.
    pub(super) fn changed(&mut self) {
        self.publish();
        self.saver.dirty = true;
    }

    fn write_record(&mut self) {
        if !self.saver.dirty || self.saver.writing.is_some() || self.unreadable || self.removed {
            return;
        }
        self.saver.dirty = false;
        self.saver.written_for = std::mem::take(&mut self.saver.waiting);
        let (record, folder) = (self.record.clone(), self.folder());
        self.saver.writing = Some(tokio::task::spawn_blocking(move || record.save(&folder)));
    }

    fn saved(&mut self, result: io::Result<()>) {
        let result =
            result.map_err(|error| Error::io("write the VM's record", &self.folder(), &error));
        if let Err(error) = &result {
            warn!(vm = %self.record.name, %error, "a VM's record could not be written");
        }
        for waiting in self.saver.written_for.drain(..) {
            let _ = waiting.send(result.clone());
        }
        // Whether or not it could be written: a guest that waits for ever
        // would be worse.
        let over = matches!(self.record.main, MainState::Ended(_)) && !self.saver.dirty;
        if over && let Some(running) = &mut self.running {
            let stored = Stored {
                stdout: running.log.offset(Stream::Stdout),
                stderr: running.log.offset(Stream::Stderr),
                end: true,
            };
            running.acknowledge(stored);
        }
    }
}

impl Running {
    pub(super) fn new(
        process: VmmProcess,
        events: Option<Events>,
        supervisor: Supervisor,
        log: Writer,
        deadline: Instant,
        volumes: Vec<crate::volumes::Lease>,
    ) -> Running {
        let (notify, notices) = mpsc::unbounded_channel();
        Running {
            process,
            events,
            supervisor,
            link: None,
            log,
            unstored: None,
            retry_at: None,
            acknowledged: Stored::default(),
            deadline: Some(deadline),
            stopping: None,
            ended: None,
            adopted: false,
            notices,
            notify,
            _volumes: volumes,
        }
    }

    async fn next(&mut self, held_up: bool) -> Event {
        let has_events = self.events.is_some();
        let events = &self.events;
        let alive = self.ended.is_none();
        let deadline = self.deadline;
        let retry = self.retry_at;
        // No order among these: a guest that makes one of them ready all the
        // time must not keep the others from their turn.
        tokio::select! {
            () = async {
                if let Some(events) = events {
                    events.readable().await;
                }
            }, if has_events => Event::VmmEvents,
            Some(notice) = self.notices.recv() => Event::Notice(notice),
            Some(message) = self.supervisor.messages.recv(), if !held_up => Event::Link(message),
            how = self.process.ended(), if alive => Event::ProcessEnded(how),
            () = at(deadline) => Event::Deadline,
            () = at(retry) => Event::RetryStoring,
        }
    }

    pub(super) fn acknowledge(&mut self, stored: Stored) {
        self.acknowledged = stored;
        if let Some(link) = &self.link {
            link.stored.send_replace(stored);
        }
    }
}

/// Sleeps until then; without a time, for ever.
async fn at(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}
