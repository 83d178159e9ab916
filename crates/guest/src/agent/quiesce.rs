//! Freezes programs for a capture, and thaws them afterwards.

use super::connection::Need;
use super::hold::{Hold, Phase};
use super::run::{Agent, Detached};
use crate::freezer::Frozen;
use crate::gate::{self, Verdict, generation};
use crate::poll::{Channel, PollSet, Token};
use crate::program::prepare::reason;
use crate::report::{self, Report};
use crate::service::Service;
use crate::supervisor::first_command::FirstCommand;
use crate::supervisor::link::Identity;
use crate::{boot, files, syscalls};
use alloc::{format, string::String, vec::Vec};
use jiffy_wire::trace::{
    MARK_COMMAND_STARTED, MARK_GATE_ENTERED, MARK_GATE_FAILED, MARK_GATE_PASSED,
};
use rustix::event::PollFlags;
use rustix::fd::OwnedFd;

/// Time limit for the host to confirm the output of programs, nanoseconds.
const CONFIRMATION_NS: u64 = 500_000_000;
/// Most rounds of reading output that programs wrote before they were frozen; a pipe holds 64 KiB.
const MOST_TURNS: usize = 4096;

impl Agent {
    /// Freezes programs for the connection at `index`. It is answered when all are frozen and their
    /// output is confirmed, or with an error.
    pub(super) fn quiesce(&mut self, index: usize, drop_caches: bool, now: u64) {
        let begun = self.freeze();
        let connection = &mut self.connections[index];
        match begun {
            Ok((frozen, known, random)) => {
                self.hold = Some(Hold {
                    connection: connection.id(),
                    frozen,
                    known,
                    random,
                    drop_caches,
                    phase: Phase::Delivering {
                        give_up_at: now + CONFIRMATION_NS,
                    },
                });
                connection.hold();
            }
            Err(message) => connection.answer(Err(message), now),
        }
    }

    fn freeze(&mut self) -> Result<(Frozen, Option<String>, OwnedFd), String> {
        if self.shutdown.is_some() {
            return Err("the VM is about to end".into());
        }
        if self.changes_reader.is_some() {
            return Err("the changes of its root file system are being read".into());
        }
        let source = &self.options.fw_cfg;
        if !source.is_current() {
            return Err(
                "this guest could not detect that it was restored: its kernel gives no access to I/O ports (ioperm)"
                    .into(),
            );
        }
        let known = generation::known(source)?;
        let random = gate::random()?;
        let now = syscalls::monotonic_ns();
        // Without programs nothing needs to be frozen.
        let frozen = if self.has_no_programs(now) && !self.options.beside_init {
            Frozen::default()
        } else {
            self.options.freezer.freeze()?
        };
        Ok((frozen, known, random))
    }

    /// Next step of a quiesce: sends output of programs to the host and waits for the confirmation,
    /// so that no clone sends the output again.
    pub(super) fn advance_hold(&mut self, now: u64) {
        let Some(Hold {
            phase: Phase::Delivering { give_up_at },
            ..
        }) = self.hold
        else {
            return;
        };
        let has_read = self.drain();
        if has_read {
            self.send_to_node(now);
        }
        let delivered = match (&self.first, self.options.link.is_up()) {
            (Some(first), true) => !has_read && first.is_confirmed(),
            _ => true,
        };
        if !delivered && now < give_up_at {
            return;
        }
        let Some(hold) = &mut self.hold else { return };
        hold.phase = Phase::Answered;
        let (id, drop_caches) = (hold.connection, hold.drop_caches);
        if self.options.owns_machine {
            sync_writable_disks();
            if drop_caches {
                drop_all_caches(&mut self.options.report);
            }
        }
        let found = self.connections.iter_mut().find(|it| it.id() == id);
        if let Some(connection) = found {
            connection.answer_quiesced();
        }
    }

    /// Reads output that programs left in their pipes; returns whether there was any.
    fn drain(&mut self) -> bool {
        let mut has_read = false;
        for _ in 0..MOST_TURNS {
            let mut set = PollSet::new();
            self.interest_of_programs(&mut set);
            let Ok(ready) = set.wait(Some(0)) else { break };
            let outputs = ready.into_iter().filter(|(token, _)| token.is_output());
            let outputs: Vec<(Token, PollFlags)> = outputs.collect();
            if outputs.is_empty() {
                break;
            }
            has_read = true;
            let now = syscalls::monotonic_ns();
            for (token, flags) in outputs {
                self.dispatch(token, flags, now);
            }
        }
        has_read
    }

    /// Adds the streams of all programs to the poll set.
    fn interest_of_programs<'a>(&'a self, set: &mut PollSet<'a>) {
        if let Some(first) = &self.first {
            first.interest(set);
        }
        self.services.iter().for_each(|it| it.interest(set));
        self.connections
            .iter()
            .for_each(|it| it.interest_of_program(set));
        self.detached.iter().for_each(|it| it.interest(set));
    }

    /// The quiescing connection has ended: thaws programs, after the gate if the guest was
    /// restored.
    pub(super) fn release(&mut self, now: u64) {
        let Some(hold) = self.hold.take() else {
            return;
        };
        match gate::check_generation(&self.options.fw_cfg, hold.known.as_deref()) {
            Ok(Verdict::Same) => {
                hold.frozen.thaw();
                self.connections.iter_mut().for_each(|it| it.thawed(now));
            }
            Ok(Verdict::New(restored)) => self.apply_generation(hold, *restored),
            Err(message) => {
                self.options.trace.mark(MARK_GATE_ENTERED);
                self.fail_gate(&message);
            }
        }
    }

    fn apply_generation(&mut self, hold: Hold, restored: gate::RestoredGuest) {
        self.options.trace.mark(MARK_GATE_ENTERED);
        // Spans and log lines so far belong to the captured guest.
        self.options.report = Report::default();
        self.log.clear();
        (self.log_bytes, self.log_lost) = (0, 0);
        let gate::RestoredGuest {
            generation,
            config,
            entered_ns,
        } = &restored;
        let vm_id = match config {
            Some(config) => config.vm_id.clone(),
            None => self.options.link.vm_id().into(),
        };
        let identity = Identity {
            vm_id,
            pid1_ns: *entered_ns,
        };
        // Connects early; the host answers meanwhile.
        self.ready_sent = false;
        self.options.link.restart(identity, *entered_ns);
        if self.options.owns_machine {
            let applied = gate::apply(
                &restored,
                &hold.random,
                &self.options.config,
                &mut self.options.teardown,
                &mut self.options.report,
            );
            if let Err(message) = applied {
                return self.fail_gate(&message);
            }
        }
        self.options.trace.mark(MARK_GATE_PASSED);
        let start_main = generation.start_main;
        hold.frozen.thaw();
        self.resume_with(restored.config, start_main);
    }

    /// Continues with the new configuration after the thaw.
    fn resume_with(&mut self, config: Option<jiffy_wire::guest::GuestConfig>, start_main: bool) {
        let now = syscalls::monotonic_ns();
        let before = config.map(|config| core::mem::replace(&mut self.options.config, config));
        let earlier = self.first.take();
        match (&self.options.config.main, start_main) {
            (Some(main), true) => {
                // The new command starts first.
                let first = FirstCommand::start(main, self.options.report.missing());
                if first.is_running() {
                    self.options.trace.mark(MARK_COMMAND_STARTED);
                }
                self.first = Some(first);
                if let Some(program) = earlier.and_then(FirstCommand::into_program) {
                    self.detached.push(Detached::without_time_limit(program));
                }
            }
            (main, _) => {
                if main.is_none() && start_main {
                    let message = "the new configuration has no first command";
                    self.options.report.warn("gate", message);
                }
                self.first = earlier.and_then(FirstCommand::for_new_host);
            }
        }
        // Their peers were connected to the captured guest.
        while !self.connections.is_empty() {
            self.drop_connection(0, now);
        }
        if let Some(before) = before {
            let given = self.options.config.services.iter();
            let new = given.filter(|it| !before.services.iter().any(|old| old.name == it.name));
            for service in new {
                let index = self.services.len();
                self.services.push(Service::new(index, service));
            }
        }
    }

    /// Leaves programs frozen and makes the VMM end the VM.
    fn fail_gate(&mut self, message: &str) {
        let message = format!("the restored guest cannot continue: {message}");
        report::log(&message);
        self.options
            .console
            .write_line("jiffy-init", message.as_bytes());
        self.options.trace.mark(MARK_GATE_FAILED);
        self.gate_failed = true;
    }

    /// The quiescing connection is readable: it was closed, or it violates the protocol.
    pub(super) fn hold_ready(&mut self, flags: PollFlags, now: u64) {
        let Some(id) = self.hold.as_ref().map(|it| it.connection) else {
            return;
        };
        if let Some(index) = self.connections.iter().position(|it| it.id() == id) {
            let need = self.connections[index].ready(Channel::Peer, flags, &mut self.space, now);
            if !matches!(need, Need::Close) {
                return;
            }
            self.drop_connection(index, now);
        }
        self.release(now);
    }
}

/// Syncs this guest's writable disks.
fn sync_writable_disks() {
    for target in boot::writable_disks() {
        if let Ok(folder) = files::open(target) {
            let _ = rustix::fs::syncfs(folder);
        }
    }
    // An overlay's upper layer may be on such a disk without being a mount point here.
    if let Ok(root) = files::open(c"/") {
        let _ = rustix::fs::syncfs(root);
    }
}

/// Drops page cache, dentries and inodes, and compacts free memory, so that it is reported to the
/// host.
fn drop_all_caches(report: &mut Report) {
    let knobs = [
        (c"/proc/sys/vm/drop_caches", b"3"),
        (c"/proc/sys/vm/compact_memory", b"1"),
    ];
    for (knob, value) in knobs {
        if let Err(error) = files::write(knob, value) {
            let message = format!("{}: {}", knob.to_string_lossy(), reason(error));
            report.warn("caches", &message);
        }
    }
}
