//! The agent's event loop.

use super::connection::Connection;
use super::hold::Hold;
use super::shutdown::{Reason, Shutdown, Step};
use crate::boot::Teardown;
use crate::console::Console;
use crate::freezer::{Freezer, Frozen};
use crate::fw_cfg::FwCfg;
use crate::kmsg::{self, Milestones};
use crate::poll::{Channel, PollSet, Token};
use crate::program::prepare::reason;
use crate::program::process::{self, Program};
use crate::report::Report;
use crate::service::{Line, Service};
use crate::supervisor::first_command::FirstCommand;
use crate::supervisor::link::Link;
use crate::syscalls::{self, SignalSet};
use crate::trace::Trace;
use alloc::{boxed::Box, collections::VecDeque, format, string::String, vec::Vec};
use core::mem::MaybeUninit;
use jiffy_wire::agent::{ExitStatus, FromGuest, Stream};
use jiffy_wire::frame::MAX_DATA;
use jiffy_wire::guest::GuestConfig;
use jiffy_wire::trace::{MARK_AGENT_READY, MARK_COMMAND_DONE, MARK_COMMAND_STARTED};
use rustix::event::PollFlags;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use rustix::process::{Pid, WaitOptions, wait};

/// Most connections. One more replaces the one that has waited longest without a request, or is
/// closed at once.
const MOST_CONNECTIONS: usize = 256;
/// Time between SIGHUP and SIGKILL for a program whose connection was lost.
const HANGUP_NS: u64 = 5_000_000_000;
/// Grace period of other programs after the first command's end.
const AFTER_MAIN_GRACE_NS: u64 = 1_000_000_000;

const SIGINT: i32 = 2;
const SIGKILL: i32 = 9;
const SIGUSR1: i32 = 10;
const SIGUSR2: i32 = 12;
pub(super) const SIGPIPE: i32 = 13;
const SIGTERM: i32 = 15;
const SIGCHLD: i32 = 17;
const SIGCONT: i32 = 18;
const SIGPWR: i32 = 30;
/// systemd's "power off".
const SIGRTMIN_4: i32 = 38;

/// Options of the event loop.
#[derive(Debug)]
pub struct Options {
    /// The guest's configuration.
    pub config: GuestConfig,
    /// Listening socket for the host's connections, if there is one.
    pub listener: Option<OwnedFd>,
    /// The channel to the node.
    pub link: Link,
    /// Output for guests without a channel to the node.
    pub console: Console,
    /// Spans and warnings of the boot.
    pub report: Report,
    /// The trace port.
    pub trace: Trace,
    /// Access to the host's files for this guest.
    pub fw_cfg: FwCfg,
    /// Freezes programs for a capture.
    pub freezer: Freezer,
    /// Mounts to undo at the end.
    pub teardown: Teardown,
    /// Whether this process is PID 1 of a VM, which it sets up and ends.
    pub owns_machine: bool,
    /// Whether a distribution's init is PID 1 and this process serves beside it.
    pub beside_init: bool,
}

/// How the event loop ended.
#[derive(Debug)]
pub struct End {
    /// Power off or reboot.
    pub reason: Reason,
    /// Mounts to undo.
    pub teardown: Teardown,
}

/// State of the event loop.
#[derive(Debug)]
pub struct Agent {
    pub(super) options: Options,
    signals: OwnedFd,
    pub(super) first: Option<FirstCommand>,
    pub(super) services: Vec<Service>,
    pub(super) connections: Vec<Connection>,
    next_connection: u64,
    /// Programs without a connection.
    pub(super) detached: Vec<Detached>,
    /// Forked processes that serve a request.
    pub(super) copies: Vec<Pid>,
    /// State of a capture for which programs are frozen.
    pub(super) hold: Option<Hold>,
    /// A process that reads the root's changes, and the programs that are frozen for it.
    pub(super) changes_reader: Option<(Pid, Frozen)>,
    /// The guest was restored, but its new generation could not be applied.
    pub(super) gate_failed: bool,
    pub(super) log: VecDeque<Line>,
    pub(super) log_bytes: usize,
    pub(super) log_lost: u64,
    pub(super) ready_sent: bool,
    milestones: Milestones,
    pub(super) shutdown: Option<Shutdown>,
    last_messages_sent: bool,
    pub(super) space: Box<[MaybeUninit<u8>]>,
}

/// A program whose connection was lost, or that was replaced as the first command. Its output is
/// read and discarded, so that it is not killed by a write while it cleans up.
#[derive(Debug)]
pub(super) struct Detached {
    program: Program,
    kill_at: u64,
}

impl Detached {
    /// A detached program without a time limit.
    pub(super) fn without_time_limit(program: Program) -> Detached {
        Detached {
            program,
            kill_at: u64::MAX,
        }
    }

    pub(super) fn interest<'a>(&'a self, set: &mut PollSet<'a>) {
        let pid = self.program.pid();
        self.program
            .interest([true; 2], |channel| Token::Detached(pid, channel), set);
    }
}

/// Signals that are blocked and read from the signalfd. SIGPIPE stays blocked: writes
/// return EPIPE.
fn signals_blocked() -> SignalSet {
    SignalSet::of(&[
        SIGCHLD, SIGTERM, SIGINT, SIGUSR1, SIGUSR2, SIGPWR, SIGRTMIN_4, SIGPIPE,
    ])
}

impl Agent {
    /// Starts the first command, then the rest of the agent.
    ///
    /// # Errors
    ///
    /// If there is no signal descriptor.
    pub fn start(options: Options) -> Result<Agent, String> {
        syscalls::block_only(signals_blocked());
        let missing = options.report.missing();
        let main = options.config.main.as_ref();
        let first = main.map(|main| FirstCommand::start(main, missing));
        if first.as_ref().is_some_and(FirstCommand::is_running) {
            options.trace.mark(MARK_COMMAND_STARTED);
        }
        let mut read = signals_blocked();
        read.0 &= !SignalSet::of(&[SIGPIPE]).0;
        let signals = syscalls::signal_descriptor(read)
            .map_err(|error| format!("no signal descriptor could be created: {}", reason(error)))?;
        let given = options.config.services.iter().enumerate();
        let services = given
            .map(|(index, service)| Service::new(index, service))
            .collect();
        if options.listener.is_some() {
            options.trace.mark(MARK_AGENT_READY);
        }
        let milestones = Milestones::new(options.config.timeline);
        Ok(Agent {
            options,
            signals,
            first,
            services,
            connections: Vec::new(),
            next_connection: 0,
            detached: Vec::new(),
            copies: Vec::new(),
            hold: None,
            changes_reader: None,
            gate_failed: false,
            log: VecDeque::new(),
            log_bytes: 0,
            log_lost: 0,
            ready_sent: false,
            milestones,
            shutdown: None,
            last_messages_sent: false,
            space: Box::new_uninit_slice(MAX_DATA),
        })
    }

    /// Runs the event loop until the VM ends.
    pub fn run(mut self) -> End {
        loop {
            let now = syscalls::monotonic_ns();
            self.advance(now);
            if let Some(end) = self.settle(now) {
                return end;
            }
            match self.wait(now) {
                Ok(ready) => {
                    let now = syscalls::monotonic_ns();
                    for (token, flags) in ready {
                        self.dispatch(token, flags, now);
                    }
                }
                Err(error) => {
                    // Perhaps out of memory: avoid a busy loop.
                    self.options
                        .report
                        .warn("agent", &format!("poll: {}", reason(error)));
                    let pause = rustix::thread::Timespec {
                        tv_sec: 0,
                        tv_nsec: 100_000_000,
                    };
                    let _ = rustix::thread::nanosleep(&pause);
                }
            }
        }
    }

    /// Handles timeouts.
    fn advance(&mut self, now: u64) {
        self.options.link.advance(now);
        if self.hold.is_some() {
            // While programs are frozen, nothing starts and no time limit runs.
            return self.advance_hold(now);
        }
        let mut lines = Vec::new();
        for service in &mut self.services {
            service.advance(now, &mut lines);
        }
        self.log_lines(lines);
        for detached in &mut self.detached {
            if now >= detached.kill_at {
                let _ = detached.program.signal(SIGKILL);
                detached.kill_at = u64::MAX;
            }
        }
        let mut index = 0;
        while index < self.connections.len() {
            if self.connections[index].expired(now) {
                self.drop_connection(index, now);
            } else {
                index += 1;
            }
        }
    }

    /// Waits for the next event or deadline.
    fn wait(&self, now: u64) -> Result<Vec<(Token, PollFlags)>, Errno> {
        let mut set = PollSet::new();
        set.add(&self.signals, PollFlags::IN, Token::Signals);
        let reading = self.first.as_ref().is_none_or(FirstCommand::takes_input);
        self.options.link.interest(reading, &mut set);
        self.options.console.interest(&mut set);
        if let Some(first) = &self.first {
            first.interest(&mut set);
        }
        if let Some(hold) = &self.hold {
            let holding = |it: &&Connection| it.id() == hold.connection;
            if let Some(connection) = self.connections.iter().find(holding) {
                connection.interest(&mut set);
            }
        } else {
            if let Some(listener) = &self.options.listener {
                set.add(listener, PollFlags::IN, Token::Listener);
            }
            self.services.iter().for_each(|it| it.interest(&mut set));
            self.connections.iter().for_each(|it| it.interest(&mut set));
            self.detached.iter().for_each(|it| it.interest(&mut set));
        }
        set.wait(
            self.next_deadline()
                .map(|deadline| deadline.saturating_sub(now)),
        )
    }

    fn next_deadline(&self) -> Option<u64> {
        if let Some(hold) = &self.hold {
            let link = self.options.link.deadline();
            return [link, hold.deadline()].into_iter().flatten().min();
        }
        let connections = self.connections.iter().filter_map(Connection::deadline);
        let services = self.services.iter().filter_map(Service::deadline);
        let detached = self
            .detached
            .iter()
            .map(|detached| detached.kill_at)
            .filter(|at| *at != u64::MAX);
        let others = [
            self.options.link.deadline(),
            self.first.as_ref().and_then(FirstCommand::deadline),
            self.shutdown.as_ref().map(Shutdown::deadline),
        ];
        connections
            .chain(services)
            .chain(detached)
            .chain(others.into_iter().flatten())
            .min()
    }

    pub(super) fn dispatch(&mut self, token: Token, flags: PollFlags, now: u64) {
        match token {
            Token::Signals => self.take_signals(now),
            Token::Listener => self.accept(now),
            Token::Supervisor => self.link_ready(now),
            Token::Console => self.options.console.flush(),
            Token::Main(channel) => {
                if let Some(first) = &mut self.first {
                    first.ready(channel, &mut self.space, now);
                }
            }
            Token::Service(index, channel) => {
                let mut lines = Vec::new();
                if let Some(service) = self.services.get_mut(index) {
                    service.ready(channel, &mut self.space, now, &mut lines);
                }
                self.log_lines(lines);
            }
            Token::Detached(pid, channel) => {
                let found = self.detached.iter_mut().find(|it| it.program.pid() == pid);
                if let Some(Detached { program, .. }) = found {
                    match channel {
                        Channel::Stdout => drop(program.read(Stream::Stdout, &mut self.space, now)),
                        Channel::Stderr => drop(program.read(Stream::Stderr, &mut self.space, now)),
                        Channel::Stdin | Channel::Peer => program.write_input(),
                    }
                }
            }
            // Other connections are served after the thaw.
            Token::Connection(id, Channel::Peer) if self.hold.is_some() => {
                if self.hold.as_ref().is_some_and(|it| it.connection == id) {
                    self.hold_ready(flags, now);
                }
            }
            Token::Connection(id, channel) => {
                let found = self
                    .connections
                    .iter()
                    .position(|connection| connection.id() == id);
                if let Some(index) = found {
                    let need = self.connections[index].ready(channel, flags, &mut self.space, now);
                    self.handle_need(index, need, now);
                }
            }
        }
    }

    // Processes.

    fn take_signals(&mut self, now: u64) {
        let mut records = [0u8; 128 * 16];
        let count = rustix::io::read(&self.signals, &mut records[..]).unwrap_or(0);
        for signal in syscalls::signals_read(&records[..count]) {
            match signal {
                // Reaped below: several signals may have been merged into one.
                SIGCHLD => {}
                // The distribution's init ends all processes itself.
                _ if self.options.beside_init => {}
                SIGTERM | SIGINT => self.begin_shutdown(Reason::Restart, AFTER_MAIN_GRACE_NS, now),
                _ => self.begin_shutdown(Reason::PowerOff, AFTER_MAIN_GRACE_NS, now),
            }
        }
        self.reap(now);
    }

    /// Reaps all ended children. Returns whether no child is left.
    fn reap(&mut self, now: u64) -> bool {
        loop {
            match wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) => {
                    if let Some(status) = process::exit_status(status) {
                        self.reaped(pid, status, now);
                    }
                }
                Ok(None) => return false,
                Err(Errno::INTR) => {}
                Err(_) => return true,
            }
        }
    }

    fn reaped(&mut self, pid: Pid, status: ExitStatus, now: u64) {
        if let Some((_, frozen)) = self.changes_reader.take_if(|(reader, _)| *reader == pid) {
            frozen.thaw();
        }
        self.detached
            .retain(|detached| detached.program.pid() != pid);
        self.copies.retain(|copy| *copy != pid);
        let _ = self
            .first
            .as_mut()
            .is_some_and(|first| first.reaped(pid, status, now))
            || self
                .connections
                .iter_mut()
                .any(|connection| connection.reaped(pid, status, now))
            || self
                .services
                .iter_mut()
                .any(|service| service.reaped(pid, status, now));
    }

    // Connections.

    fn accept(&mut self, now: u64) {
        let Some(listener) = &self.options.listener else {
            return;
        };
        // One connection per turn of the loop.
        let Ok(socket) = accept_with(listener, SocketFlags::CLOEXEC) else {
            return;
        };
        if self.connections.len() >= MOST_CONNECTIONS {
            let waiting = self.connections.iter().enumerate();
            let waiting = waiting.filter_map(|(index, it)| Some((it.waits_until()?, index)));
            if let Some((_, index)) = waiting.min() {
                self.drop_connection(index, now);
            }
        }
        if self.connections.len() >= MOST_CONNECTIONS {
            self.options.report.warn(
                "agent",
                &format!("a connection over {MOST_CONNECTIONS} was refused"),
            );
            return;
        }
        let id = self.next_connection;
        self.next_connection += 1;
        self.connections.push(Connection::new(id, socket, now));
    }

    /// Closes a connection; its program gets SIGHUP.
    pub(super) fn drop_connection(&mut self, index: usize, now: u64) {
        let connection = self.connections.swap_remove(index);
        if let Some(mut program) = connection.into_program()
            && !program.has_exited()
        {
            program.hang_up();
            self.detached.push(Detached {
                program,
                kill_at: now + HANGUP_NS,
            });
        }
    }

    // The end of an iteration, and the shutdown.

    /// Handles everything that is complete: programs, answers, the shutdown.
    fn settle(&mut self, now: u64) -> Option<End> {
        if self.gate_failed {
            return Some(self.end(Reason::PowerOff));
        }
        let held = self.hold.is_some();
        let mut lines = Vec::new();
        self.services
            .iter_mut()
            .for_each(|service| service.settle(held, now, &mut lines));
        self.log_lines(lines);
        let first = self.first.as_mut();
        if first.is_some_and(|first| first.settle(held, now)) {
            self.options.trace.mark(MARK_COMMAND_DONE);
        }
        // Reported after the start of the first command and before its end.
        kmsg::report(&mut self.milestones, &mut self.options.report);
        let mut index = 0;
        while index < self.connections.len() {
            if self.connections[index].settle(held, now) {
                let id = self.connections[index].id();
                self.drop_connection(index, now);
                // The peer closed it before the answer was sent.
                if self.hold.as_ref().is_some_and(|it| it.connection == id) {
                    self.release(now);
                }
            } else {
                index += 1;
            }
        }
        self.send_to_node(now);
        let stored = self.first.as_ref().is_some_and(FirstCommand::end_is_stored);
        let may_end = self.shutdown.is_none() && self.hold.is_none();
        if stored && self.options.config.power_off_after_main && may_end {
            self.begin_shutdown(Reason::PowerOff, AFTER_MAIN_GRACE_NS, now);
        }
        self.advance_shutdown(now)
    }

    pub(super) fn begin_shutdown(&mut self, reason: Reason, grace_ns: u64, now: u64) {
        match &mut self.shutdown {
            Some(shutdown) => shutdown.shorten_grace(grace_ns, now),
            None => {
                self.services.iter_mut().for_each(Service::prevent_restart);
                self.signal_all(SIGTERM);
                self.signal_all(SIGCONT);
                self.shutdown = Some(Shutdown::begin(reason, grace_ns, now));
            }
        }
    }

    /// Signals every process as PID 1, otherwise only the programs started from here.
    fn signal_all(&self, signal: i32) {
        syscalls::kill_all_as_pid1(signal);
        if rustix::process::getpid() != Pid::INIT {
            let first = self.first.iter().filter_map(FirstCommand::program);
            let services = self.services.iter().filter_map(Service::program);
            let connections = self.connections.iter().filter_map(Connection::program);
            let detached = self.detached.iter().map(|detached| &detached.program);
            for program in first.chain(services).chain(connections).chain(detached) {
                let _ = program.signal(signal);
            }
        }
    }

    fn advance_shutdown(&mut self, now: u64) -> Option<End> {
        self.shutdown.as_ref()?;
        let no_programs = self.has_no_programs(now);
        let delivered = self.last_messages_sent && self.is_delivered();
        let shutdown = self.shutdown.as_mut()?;
        let reason = shutdown.reason;
        match shutdown.advance(now, no_programs, delivered) {
            Step::Wait => None,
            Step::Kill => {
                self.signal_all(SIGKILL);
                None
            }
            Step::LastMessages => {
                self.last_messages_sent = true;
                self.send_to_node(now);
                if let Some(stream) = self.options.link.up() {
                    stream.send(&FromGuest::PoweringOff);
                    self.options.link.flush(now);
                }
                // There are often no messages left.
                self.is_delivered().then(|| self.end(reason))
            }
            Step::Leave => Some(self.end(reason)),
        }
    }

    fn end(&mut self, reason: Reason) -> End {
        End {
            reason,
            teardown: core::mem::take(&mut self.options.teardown),
        }
    }

    /// Whether no program is left. PID 1 inherits every orphan, so it is alone exactly if it has no
    /// child.
    pub(super) fn has_no_programs(&mut self, now: u64) -> bool {
        let childless = self.reap(now);
        childless
            && !self.first.as_ref().is_some_and(FirstCommand::is_running)
            && self
                .connections
                .iter()
                .all(|connection| connection.program().is_none())
    }

    /// Whether the kernel has taken all messages to the host.
    fn is_delivered(&mut self) -> bool {
        let told = match self.options.link.up() {
            Some(stream) => stream.unsent() == 0,
            None => true,
        };
        told && self.connections.is_empty()
    }
}
