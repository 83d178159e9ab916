//! Messages of the guest's init, and how the VM's task handles them.

use crate::handle::is_active;
use crate::jails::capture_headroom;
use crate::log::Kind;
use crate::supervisor::{FromLink, Link, Stored};
use crate::task::actor::{Actor, RETRY_STORING, Unstored};
use crate::task::adopt;
use crate::task::end::EndReason;
use crate::task::phase::Guest;
use crate::task::stop::DEFAULT_GRACE;
use crate::text::{short, truncate};
use jiffy_content::error::Error;
use jiffy_content::model::vm::{MAX_WARNINGS, MainEnd, MainState};
use jiffy_wire::agent::{ExitStatus, FromGuest, MAIN_OUTPUT_WINDOW, StartError, Stream, ToGuest};
use jiffy_wire::api::VmState;
use jiffy_wire::frame::MAX_DATA;
use jiffy_wire::sched::Class;
use tokio::task::block_in_place;
use tokio::time::Instant;
use tracing::{debug, info, warn};

/// Bytes of a stream that may be stored without an acknowledgement: a quarter of the guest's
/// buffer.
const ACKNOWLEDGE_EVERY: u64 = MAIN_OUTPUT_WINDOW as u64 / 4;

/// Limit of output offsets, so that they never overflow; no command writes that much.
const MAX_OFFSET: u64 = 1 << 62;
/// Most characters of why a command did not start, which may name a path of 4096.
const MAX_START_ERROR: usize = 8192;
/// A log of fewer bytes is written without asking for another thread.
const SMALL_LOG: u64 = 1 << 20;

impl Actor {
    pub(super) fn link(&mut self, message: FromLink) {
        match message {
            FromLink::Hello {
                link,
                pid1_ns,
                attempt,
            } => self.hello(link, pid1_ns, attempt),
            FromLink::Message(serial, message) => {
                let current = self
                    .phase
                    .running()
                    .and_then(|running| running.link.as_ref());
                if current.is_some_and(|link| link.serial == serial) {
                    self.guest(message);
                }
            }
            FromLink::Gone(serial) => {
                if let Some(running) = self.phase.running_mut()
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
        let Some(running) = self.phase.running_mut() else {
            return;
        };
        if running
            .link
            .as_ref()
            .is_some_and(|now| now.serial > link.serial)
        {
            // The guest has already replaced the connection of this hello.
            debug!(vm = %self.record.name, attempt, "ignored the hello of a connection that the guest has replaced");
            return;
        }
        if let Err(error) = running.log.reopen() {
            // The guest keeps unacknowledged output and reconnects.
            debug!(vm = %self.record.name, %error, "a guest's output can't be stored yet");
            return;
        }
        debug!(vm = %self.record.name, attempt, "the guest's init connected");
        self.recorder.pid1_guest(pid1_ns);
        let offset = |stream| running.log.offset(stream);
        let welcome = ToGuest::Welcome {
            version: link.version,
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
        running.link = Some(link);
        let adopted = running.adopted;
        if adopted && self.record.state == VmState::Starting {
            // `Ready` may have been sent to the earlier daemon.
            self.probe_agent();
        }
        let is_reachable = || adopt::is_reachable(&self.host.paths, &self.record.id);
        if adopted && self.record.failure.is_some() && is_reachable() {
            info!(vm = %self.record.name, "the VM is adopted in full");
            self.record.failure = None;
            self.changed();
        }
    }

    fn guest(&mut self, message: FromGuest) {
        match message {
            // A second hello on one connection is ignored.
            FromGuest::Hello { .. } => {}
            FromGuest::Spans(spans) => self.recorder.guest_spans(spans),
            FromGuest::Warning { step, message } => {
                self.warning(&format!("{}: {}", short(&step), short(&message)));
            }
            FromGuest::Ready => {
                self.recorder.note_ready();
                self.ready();
            }
            FromGuest::MainStarted { pid } => {
                self.recorder.note_started();
                if self.record.main == MainState::Pending {
                    // No fallback to a boot any more: it would start the command twice.
                    self.gate_passed();
                    self.record.main = MainState::Started;
                    self.record.main_pid = Some(pid);
                    self.changed_in_passing();
                }
                // Each connection repeats this, after it has reported its room for input.
                self.offer_input();
            }
            FromGuest::MainFailed(error) => {
                self.recorder.note_ended();
                self.main_ended(MainEnd::Failed(StartError {
                    message: truncate(&error.message, MAX_START_ERROR),
                    ..error
                }));
                self.confirm_end();
            }
            FromGuest::MainOutput {
                stream,
                offset,
                data,
            } => self.output(stream, offset, data),
            FromGuest::MainExited(status) => {
                self.recorder.note_ended();
                self.ask_for_faults();
                self.main_ended(MainEnd::Exited(status));
                self.confirm_end();
            }
            FromGuest::ServiceLog { name, line } => {
                let line = String::from_utf8_lossy(&line);
                let note = format!("[{}] {line}\n", short(&name));
                self.note(&note);
            }
            FromGuest::PoweringOff => {
                if !self.is_paused_or_hibernated() {
                    self.record.state = VmState::Stopping;
                }
                self.powers_off();
                // Saved now, because the guest does not report it to the next daemon.
                self.changed();
            }
            FromGuest::MainInputRoom { bytes } => {
                if let Some(running) = self.phase.running_mut()
                    && let Some(link) = &mut running.link
                {
                    link.add_credit(bytes);
                }
            }
        }
    }

    /// Is it paused or hibernated? What its guest sent before is read now, if a slow client held
    /// that up.
    fn is_paused_or_hibernated(&self) -> bool {
        matches!(self.record.state, VmState::Paused | VmState::Hibernated)
    }

    pub(super) fn ready(&mut self) {
        if self.record.state != VmState::Starting {
            return;
        }
        info!(vm = %self.record.name, "VM ready");
        self.record.state = VmState::Running;
        self.gate_passed();
        self.ask_for_faults();
        if let Some(running) = self.phase.running_mut() {
            let pid = running.process.pid;
            self.host.scheduler.tell(pid, Class::Steady);
            if let Some(room) = &mut running.room {
                room.note_ready();
            }
            if let Guest::Woken = running.guest {
                running.guest = Guest::Up;
            }
            if running.stopping().is_none() {
                running.deadline = None;
            }
        }
        self.changed_in_passing();
        if self.record.spec.command.is_some() && matches!(self.record.main, MainState::Ended(_)) {
            // Its command had ended before it fell asleep: its init does not report that again, and
            // does not power off by itself.
            let _ = self.stop(DEFAULT_GRACE);
        }
    }

    fn warning(&mut self, text: &str) {
        // A guest can send any number of them, and the daemon's log is never cut.
        if self.record.warnings.len() < MAX_WARNINGS {
            info!(vm = %self.record.name, warning = text, "warning of the guest's init");
            self.record.warnings.push(text.to_owned());
            self.changed();
        }
        self.note(&format!("[init] {text}\n"));
    }

    /// Appends a note to the log. A note that can't be stored is dropped, unlike output.
    fn note(&mut self, text: &str) {
        if let Some(running) = self.phase.running_mut() {
            let bytes = text.as_bytes();
            let end = bytes.len().min(MAX_DATA);
            if let Ok(end) = running.log.append(Kind::Note, &bytes[..end]) {
                self.log_end.send_replace(end);
            }
        }
    }

    fn output(&mut self, stream: Stream, offset: u64, data: Vec<u8>) {
        let Some(running) = self.phase.running_mut() else {
            return;
        };
        let mut stored = running.log.offset(stream);
        if running.adopted && (stored + 1..MAX_OFFSET).contains(&offset) {
            // An earlier daemon stored these bytes in a log that was damaged or removed.
            let lost = offset - stored;
            running.log.skip_to(stream, offset);
            stored = offset;
            self.note(&format!("[node] {lost} bytes of output are lost\n"));
        }
        let Some(running) = self.phase.running_mut() else {
            return;
        };
        let repeated = stored.saturating_sub(offset);
        if offset > stored || data.len() > MAX_DATA {
            if running.supervisor.complaints.may_be_logged() {
                warn!(vm = %self.record.name, "the guest skipped some output: its connection is closed");
            }
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
        let Some(running) = self.phase.running_mut() else {
            return;
        };
        let is_small = running.log.end() < SMALL_LOG;
        let mut append = || running.log.append(kind, &data);
        // A busy disk holds up a guest that writes much, not the threads that serve all VMs.
        let appended = match is_small {
            true => append(),
            false => block_in_place(append),
        };
        match appended {
            Ok(end) => {
                running.unstored = None;
                let stored = Stored {
                    stdout: running.log.offset(Stream::Stdout),
                    stderr: running.log.offset(Stream::Stderr),
                    ..running.acknowledged
                };
                let told = running.acknowledged;
                if running.acknowledge_at_once
                    || stored.stdout - told.stdout >= ACKNOWLEDGE_EVERY
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
                if let Some(running) = self.phase.running_mut() {
                    running.unstored = Some(Unstored {
                        kind,
                        data,
                        retry_at: Instant::now() + RETRY_STORING,
                    });
                }
                self.hold_output(Some(why));
            }
        }
    }

    /// Sets whether every acknowledgement is sent at once, for a guest that is to be captured.
    pub(super) fn deliver(&mut self, at_once: bool) {
        let Some(running) = self.phase.running_mut() else {
            return;
        };
        running.acknowledge_at_once = at_once;
        if at_once {
            // The capture needs more memory.
            let growth = capture_headroom(&self.record);
            if let Err(error) = running.process.raise_memory_limit(growth) {
                debug!(vm = %self.record.name, %error, "the memory limit of a VMM could not be raised");
            }
            let stored = Stored {
                stdout: running.log.offset(Stream::Stdout),
                stderr: running.log.offset(Stream::Stderr),
                ..running.acknowledged
            };
            running.acknowledge(stored);
        }
    }

    pub(super) fn store_again(&mut self) {
        let Some(running) = self.phase.running_mut() else {
            return;
        };
        if let Some(Unstored { kind, data, .. }) = running.unstored.take() {
            self.store(kind, data);
        }
        if self
            .phase
            .running()
            .is_some_and(|running| running.unstored.is_none())
        {
            self.hold_output(None);
        }
    }

    fn hold_output(&mut self, why: Option<String>) {
        self.view.send_if_modified(|view| {
            let changed = view.held_up != why;
            if changed && let Some(why) = &why {
                tracing::error!(vm = %view.vm.name, "{why} The VM's output waits until it can be stored.");
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
            if !self.is_paused_or_hibernated() {
                self.record.state = VmState::Stopping;
            }
            if let Some(running) = self.phase.running_mut()
                && running.stopping().is_none()
            {
                running.deadline = None;
            }
        }
        self.input.send_replace(None);
        self.changed();
    }

    /// Confirms the end of the command, which the guest may have reported before.
    fn confirm_end(&mut self) {
        if let Some(running) = self.phase.running_mut() {
            if let Some(link) = &mut running.link {
                link.heard_end = true;
            }
            if running.acknowledged.end {
                running.acknowledge(running.acknowledged);
            }
        }
    }

    /// Gives attached clients access to the command's input, once it runs.
    fn offer_input(&self) {
        let link = self
            .phase
            .running()
            .and_then(|running| running.link.as_ref());
        if let Some(link) = link
            && matches!(self.record.main, MainState::Started)
        {
            self.input.send_replace(Some(link.input()));
        }
    }

    /// Handles Ctrl-C before there is a program to signal: ends the VM, as the signal would have
    /// ended the program.
    pub(super) fn interrupt(&mut self, signal: i32) {
        if self.record.main == MainState::Pending && is_active(self.record.state) {
            self.record.main = MainState::Ended(MainEnd::Exited(ExitStatus::Signal(signal)));
            self.changed();
            let _ = self.kill(EndReason::Interrupted(signal));
        }
    }
}
