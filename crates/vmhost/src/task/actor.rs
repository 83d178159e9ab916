//! The task that owns one VM.
//!
//! It sleeps until an event: a command, an event of the VMM, a message of the guest, the end of
//! the VMM, a deadline. It never waits for a guest or a client; only small files are written
//! synchronously.

use crate::clients::Clients;
use crate::events;
use crate::handle::{Command, Unbegun, View, VmHandle, is_active};
use crate::host::Host;
use crate::log::{Kind, Writer};
use crate::memory_check::MemoryCheck;
use crate::process::{Ended, Events, VmmProcess};
use crate::registry::Registry;
use crate::single_flight::SingleFlight;
use crate::supervisor::{FromLink, InputPort, Link, Stored, Supervisor};
use crate::task::end::EndReason;
use crate::task::phase::{Course, Guest, Phase, Removal};
use crate::task::saver::Saver;
use crate::task::stop::Stopping;
use crate::timeline::{PagerFaults, Recorder};
use jiffy_content::error::{Error, Result};
use jiffy_content::model::vm::{Kept, MainState, VmRecord};
use jiffy_content::room::memory::Reserved;
use jiffy_content::volumes::Lease;
use jiffy_wire::api::VmState;
use jiffy_wire::timeline::Timeline;
use jiffy_wire::trace::MARK_GATE_PASSED;
use jiffy_wire::vmm::VmmEvent;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};
use tracing::{debug, info, warn};

/// How often output is stored again while the disk is full.
pub(super) const RETRY_STORING: Duration = Duration::from_secs(1);
/// Capacity of the task's queue of commands.
const MAILBOX: usize = 16;

/// A VM's task.
pub(super) struct Actor {
    pub(super) host: Arc<Host>,
    pub(super) registry: Arc<Registry>,
    pub(super) record: VmRecord,
    pub(super) view: watch::Sender<View>,
    pub(super) log_end: watch::Sender<u64>,
    pub(super) input: watch::Sender<Option<InputPort>>,
    pub(super) clients: Arc<Clients>,
    pub(super) mailbox: mpsc::Receiver<Command>,
    pub(super) phase: Phase,
    pub(super) recorder: Recorder,
    pub(super) saver: Saver,
    pub(super) removal: Removal,
    /// Why the record on disk differs from the one in memory, if it does.
    pub(super) unsaved: Option<String>,
    /// For [`crate::pager::Pager::forget`].
    pub(super) pager_ticket: u64,
}

/// The parts of a VM that exist while its VMM lives. What happens to it is in `course` and `guest`; in
/// any of their states a connection may be closed, output unstored, or a timer off.
pub(super) struct Running {
    pub(super) process: VmmProcess,
    pub(super) events: Option<Events>,
    pub(super) supervisor: Supervisor,
    pub(super) link: Option<Link>,
    pub(super) log: Writer,
    pub(super) unstored: Option<Unstored>,
    pub(super) acknowledged: Stored,
    /// A client of the node captures it, in any course: the guest waits for acknowledgements, so each
    /// is sent at once.
    pub(super) acknowledge_at_once: bool,
    /// The timer of its start, or of a step of its end.
    pub(super) deadline: Option<Instant>,
    /// Whether the VM continues, hibernates or ends.
    pub(super) course: Course,
    /// An earlier daemon has started it; never changes.
    pub(super) adopted: bool,
    /// Requests for fault statistics that the pager has not answered yet.
    pub(super) faults_asked: u32,
    /// How far the guest is.
    pub(super) guest: Guest,
    pub(super) notices: mpsc::UnboundedReceiver<Notice>,
    pub(super) notify: mpsc::UnboundedSender<Notice>,
    /// Held while the VM runs.
    pub(super) volumes: Vec<Lease>,
    /// Its reservation of memory.
    pub(super) room: Option<Reserved>,
}

/// Output that could not be stored.
pub(super) struct Unstored {
    pub(super) kind: Kind,
    pub(super) data: Vec<u8>,
    /// When it is stored again.
    pub(super) retry_at: Instant,
}

/// Reports of a VM's helper tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Notice {
    /// The agent did not accept the request to shut down.
    ShutdownRefused,
    /// The VMM did not accept the request to stop.
    ControlRefused,
    /// The agent of an adopted VM answers.
    AgentAnswers,
    /// The pager's fault statistics of the VM, if it answered.
    Faults(Option<PagerFaults>),
}

/// What woke the task.
enum Event {
    Command(Option<Command>),
    Saved(io::Result<()>),
    SaveDue,
    VmmEvents,
    Link(FromLink),
    ProcessEnded(Ended),
    Deadline,
    RetryStoring,
    ClientsMoved,
    Notice(Notice),
}

/// A VM's task and its handle. The task starts with [`Actor::begin`].
pub(super) fn new(
    host: Arc<Host>,
    registry: Arc<Registry>,
    record: VmRecord,
) -> (Actor, Arc<VmHandle>) {
    let (mailbox_in, mailbox) = mpsc::channel(MAILBOX);
    let (view, view_out) = watch::channel(view_of(&record));
    let (log_end, log_end_out) = watch::channel(0);
    let (input, input_out) = watch::channel(None);
    let clients = Arc::new(Clients::default());
    let handle = Arc::new(VmHandle {
        id: record.id.clone(),
        name: record.name.clone(),
        spec: Arc::clone(&record.spec),
        cid: record.cid,
        operation: tokio::sync::Mutex::new(()),
        operations: watch::Sender::default(),
        view: view_out,
        log_end: log_end_out,
        clients: Arc::clone(&clients),
        memory_check: match record.state {
            VmState::Hibernated => MemoryCheck::unchecked(),
            _ => MemoryCheck::good(),
        },
        activity: Arc::default(),
        waking: SingleFlight::default(),
        input: input_out,
        mailbox: mailbox_in,
        unbegun: Unbegun::default(),
    });
    let actor = Actor {
        recorder: Recorder::new(&host.clock),
        host,
        registry,
        record,
        view,
        log_end,
        input,
        clients,
        mailbox,
        phase: Phase::Idle,
        saver: Saver::default(),
        removal: Removal::No,
        unsaved: None,
        pager_ticket: 0,
    };
    (actor, handle)
}

/// Makes a VM's task and starts it.
pub fn create(host: Arc<Host>, registry: Arc<Registry>, record: VmRecord) -> Arc<VmHandle> {
    let (actor, handle) = new(host, registry, record);
    actor.begin();
    handle
}

fn view_of(record: &VmRecord) -> View {
    View {
        vm: record.view(),
        main: record.main.clone(),
        main_pid: record.main_pid,
        failure: record.failure.clone(),
        log_start: record.log_start,
        wakes: false,
        held_up: None,
        root: record.root.clone(),
        paged: record.paged.clone(),
        leaving: record.spec.remove
            && (record.state == VmState::Exited || matches!(record.main, MainState::Ended(_))),
        removed: false,
        refusal: None,
    }
}

impl Actor {
    /// Starts the task, which runs until the VM is removed or the daemon ends.
    pub(super) fn begin(mut self) {
        // Not `self.run()` on an owned `self`: that future would store it twice, 2 KiB of each
        // hibernated VM.
        tokio::spawn(async move { self.run().await });
    }

    async fn run(&mut self) {
        loop {
            self.finish_if_over();
            self.remove_if_over().await;
            self.write_record();
            if self.removal.is_done() {
                return;
            }
            match self.next().await {
                Event::Command(None) => return,
                Event::Command(Some(command)) => self.command(command),
                Event::Saved(result) => self.saved(result),
                Event::SaveDue => self.saver.write_now(),
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
        let held_up = self.is_output_held();
        let clients_matter = held_up || !is_active(self.record.state);
        let mailbox = &mut self.mailbox;
        let saver = &mut self.saver;
        let due = saver.due();
        let clients = &self.clients;
        let phase = &mut self.phase;
        tokio::select! {
            biased;
            command = mailbox.recv() => Event::Command(command),
            // Rare, and before the guest's messages, which may come without end.
            result = saver.done() => Event::Saved(result),
            () = at(due) => Event::SaveDue,
            event = async {
                match phase {
                    Phase::Active(running) => running.next(held_up, true).await,
                    Phase::Draining(running, _) => running.next(held_up, false).await,
                    _ => std::future::pending().await,
                }
            } => event,
            () = clients.progress.notified(), if clients_matter => Event::ClientsMoved,
        }
    }

    /// Is output of the guest held back for now?
    pub(super) fn is_output_held(&self) -> bool {
        // After the VMM's end the rest of the connection is always read: it fits the log, however
        // slow a client is.
        let lives = matches!(self.phase, Phase::Active(_));
        self.phase.running().is_some_and(|running| {
            let lags = lives && self.clients.is_lagging(running.log.end());
            running.unstored.is_some() || lags
        })
    }

    fn command(&mut self, command: Command) {
        match command {
            Command::Save(reply) => {
                self.saver.waiting.push(reply);
                self.changed();
            }
            Command::Policy(policy, reply) => {
                let _ = reply.send(self.change_policy(*policy));
            }
            Command::Limits(limits, reply) => {
                let _ = reply.send(self.change_limits(*limits));
            }
            Command::Memory(mib, more, reply) => {
                self.change_memory(mib, more.map(|more| *more));
                let _ = reply.send(Ok(()));
            }
            Command::Start(plan, reply) if plan.wakes() => self.wake(plan, reply),
            Command::Start(plan, reply) => {
                let _ = reply.send(self.start(*plan));
            }
            Command::Stop(grace, reply) => {
                let _ = reply.send(self.stop(grace));
            }
            Command::Kill(reply) => {
                let _ = reply.send(self.kill(EndReason::Killed));
            }
            Command::Interrupt(signal) => self.interrupt(signal),
            Command::Remove(force, reply) => self.remove(force, reply),
            Command::Deliver(at_once) => self.deliver(at_once),
            Command::Paused(paused, reply) => {
                let _ = reply.send(self.paused(paused));
            }
            Command::MemoryWhole(faults, reply) => {
                if let Some(faults) = faults {
                    self.recorder.faults(*faults);
                }
                self.leave_pager();
                let _ = reply.send(());
            }
            Command::Hibernate(reply) => self.hibernate(reply),
            Command::Timeline(reply) => {
                let _ = reply.send(self.timeline());
            }
            Command::Flush(reply) => {
                if is_active(self.record.state) {
                    self.save_timeline();
                    let _ = self.kept().save(&self.folder());
                }
                let _ = reply.send(());
            }
        }
    }

    pub(super) fn folder(&self) -> std::path::PathBuf {
        self.host.paths.vm(&self.record.id)
    }

    /// Records that the vCPUs were paused or resumed.
    fn paused(&mut self, paused: bool) -> Result<()> {
        let state = match (self.record.state, paused) {
            (VmState::Running, true) => VmState::Paused,
            (VmState::Paused, false) if matches!(self.record.main, MainState::Ended(_)) => {
                VmState::Stopping
            }
            (VmState::Paused, false) => VmState::Running,
            (VmState::Paused, true) | (VmState::Running, false) => return Ok(()),
            _ => {
                return Err(Error::wrong_state(format!(
                    "The VM {} ended meanwhile.",
                    self.record.name
                )));
            }
        };
        info!(vm = %self.record.name, paused, "VM paused or resumed");
        self.record.state = state;
        self.changed();
        Ok(())
    }

    pub(super) fn vmm_events(&mut self) {
        let Some(running) = self.phase.running_mut() else {
            return;
        };
        let Some(events) = &mut running.events else {
            return;
        };
        let (events, closed) = events.drain();
        if closed {
            running.events = None;
        }
        let mut gate_passed = false;
        for event in events {
            match event {
                VmmEvent::Span {
                    name,
                    start_ns,
                    end_ns,
                    detail,
                } => self.recorder.vmm_span(name, start_ns, end_ns, detail),
                VmmEvent::Mark { value, at_ns } => {
                    self.recorder.mark(value, at_ns);
                    gate_passed |= value == MARK_GATE_PASSED;
                }
                VmmEvent::Activity(activity) => self.recorder.activity(activity),
                // exit.json has the same, for adopted VMs, too.
                VmmEvent::Exited(_) => {}
            }
        }
        if gate_passed {
            self.gate_passed();
        }
    }

    /// A restored guest has passed its gate; the files it was restored from are not needed again.
    pub(super) fn gate_passed(&mut self) {
        let Some(running) = self.phase.running_mut() else {
            return;
        };
        match running.guest {
            Guest::Restored | Guest::Golden { .. } => running.guest = Guest::Up,
            Guest::Waking => {
                running.guest = Guest::Woken;
                self.awake();
            }
            Guest::Woken | Guest::Up | Guest::PowersOff => {}
        }
    }

    /// What is kept of the VM on disk.
    pub(super) fn kept(&self) -> Kept {
        let powers_off = |running: &Running| matches!(running.guest, Guest::PowersOff);
        Kept {
            record: self.record.clone(),
            powering_off: self.phase.running().is_some_and(powers_off),
        }
    }

    fn process_ended(&mut self, how: Ended) {
        if let Some(running) = self.phase.running_mut() {
            debug!(vm = %self.record.name, ?how, "the VMM ended");
            running.deadline = None;
        }
        self.phase.drain(how);
    }

    /// The VM has ended when its VMM has ended and all messages of its guest are processed: the
    /// connection may still hold some.
    fn finish_if_over(&mut self) {
        let Phase::Draining(running, _) = &self.phase else {
            return;
        };
        let taken_in = running.unstored.is_none()
            && running.link.is_none()
            && running.supervisor.messages.is_empty();
        // A VM may be killed or removed to make room on a full disk, so unstored output must not
        // delay that.
        let killed = |stopping: &Stopping| stopping.reason == EndReason::Killed;
        let unwanted = running.stopping().is_some_and(killed) || self.removal.is_requested();
        let given_up = running.unstored.is_some() && unwanted;
        if taken_in || given_up {
            self.vmm_events();
            if !self.stays_hibernated() && !self.fall_back_to_boot() {
                self.finish();
            }
        }
    }

    fn deadline(&mut self) {
        let Some(running) = self.phase.running_mut() else {
            return;
        };
        running.deadline = None;
        if running.stopping().is_some() {
            self.escalate_in_time();
        } else if self.record.state == VmState::Starting {
            warn!(vm = %self.record.name, "the guest wasn't ready in time");
            if !self.gives_up_restore() {
                let _ = self.kill(EndReason::StartTimeout);
            }
        }
    }

    fn notice(&mut self, notice: Notice) {
        match notice {
            Notice::AgentAnswers => self.ready(),
            Notice::Faults(faults) => self.take_faults(faults),
            Notice::ShutdownRefused => self.escalate_from_agent(),
            Notice::ControlRefused => self.escalate_from_control(),
        }
    }

    fn timeline(&mut self) -> Timeline {
        self.vmm_events();
        if self.phase.running().is_none()
            && let Some(kept) = self.kept_timeline()
        {
            return kept;
        }
        self.recorder.build()
    }

    /// Publishes the current record.
    pub(super) fn publish(&self) {
        let mut view = view_of(&self.record);
        view.leaving |= self.removal.is_requested();
        view.wakes = self.record.state == VmState::Starting && self.phase.wakes();
        view.vm.error = view.vm.error.or_else(|| self.unsaved.clone());
        let state = view.vm.state;
        let before = self.view.borrow().vm.state;
        self.view.send_modify(|old| {
            view.held_up = old.held_up.take();
            view.refusal = old.refusal.take();
            *old = view;
        });
        if state != before {
            let action = events::action_of(state);
            self.host.events.publish_vm(action, &self.record);
        }
    }

    /// Publishes the record and has it written.
    pub(super) fn changed(&mut self) {
        self.publish();
        self.saver.write_now();
    }
}

impl Running {
    pub(super) fn new(
        process: VmmProcess,
        events: Option<Events>,
        supervisor: Supervisor,
        log: Writer,
        deadline: Instant,
        volumes: Vec<Lease>,
    ) -> Running {
        let (notify, notices) = mpsc::unbounded_channel();
        Running {
            process,
            events,
            supervisor,
            link: None,
            log,
            unstored: None,
            acknowledged: Stored::default(),
            acknowledge_at_once: false,
            deadline: Some(deadline),
            course: Course::Runs,
            adopted: false,
            faults_asked: 0,
            guest: Guest::Up,
            notices,
            notify,
            volumes,
            room: None,
        }
    }

    async fn next(&mut self, held_up: bool, lives: bool) -> Event {
        let has_events = self.events.is_some();
        let events = &self.events;
        let deadline = self.deadline;
        let retry = self.unstored.as_ref().map(|unstored| unstored.retry_at);
        // Unbiased, so that a guest that keeps one branch always ready can't starve the others.
        tokio::select! {
            () = async {
                if let Some(events) = events {
                    events.readable().await;
                }
            }, if has_events => Event::VmmEvents,
            Some(notice) = self.notices.recv() => Event::Notice(notice),
            Some(message) = self.supervisor.messages.recv(), if !held_up => Event::Link(message),
            how = self.process.ended(), if lives => Event::ProcessEnded(how),
            () = at(deadline) => Event::Deadline,
            () = at(retry) => Event::RetryStoring,
        }
    }

    /// How the VM is ending, if it is.
    pub(super) fn stopping(&self) -> Option<&Stopping> {
        match &self.course {
            Course::Stops(stopping) => Some(stopping),
            _ => None,
        }
    }

    pub(super) fn acknowledge(&mut self, stored: Stored) {
        self.acknowledged = stored;
        if let Some(link) = &self.link {
            // Init ignores a confirmation of an end that it has not reported on this connection.
            let end = stored.end && link.heard_end;
            link.stored.send_replace(Stored { end, ..stored });
        }
    }
}

/// Sleeps until `time`; forever if there is none.
async fn at(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}
