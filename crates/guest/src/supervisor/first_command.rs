//! The first command. It starts without the host, which later gets all its output.

use super::window::OutputWindow;
use crate::console::Console;
use crate::poll::{Channel, PollSet, Token};
use crate::program::process::{INPUT_LIMIT, Output, Program};
use crate::stream::FrameStream;
use alloc::format;
use core::mem::MaybeUninit;
use jiffy_wire::agent::{
    Command, ExecInput, ExitStatus, FromGuest, StartError, StartFailure, Stream,
};
use jiffy_wire::frame::MAX_DATA;
use rustix::process::Pid;

/// Most bytes of input kept for a first command that neither reads nor can write.
const MOST_INPUT: usize = 8 * 1024 * 1024;

/// The first command, and what the host has been told about it.
#[derive(Debug)]
pub struct FirstCommand {
    state: State,
    pid: u32,
    stdout: OutputWindow,
    stderr: OutputWindow,
    reported: Reported,
    end_stored: bool,
}

#[derive(Debug)]
enum State {
    Running(Program),
    Failed(StartError),
    Ended(ExitStatus),
}

/// Room for input is announced in steps of at least this many bytes.
const INPUT_PIECE: usize = INPUT_LIMIT / 4;

/// What was sent on the current connection.
#[derive(Debug, Default)]
struct Reported {
    start: bool,
    end: bool,
    /// Announced room for input that the host has not used, bytes.
    input_room: usize,
}

impl FirstCommand {
    /// Starts the command, unless something that it needs is `missing`: it would write to the root
    /// what belongs on a disk. A failure to start is reported to the host.
    pub fn start(command: &Command, missing: Option<&str>) -> FirstCommand {
        let started = match missing {
            Some(why) => Err(StartError {
                kind: StartFailure::Other,
                message: format!("The command was not started: {why}"),
            }),
            None => Program::start(command),
        };
        let (state, pid) = match started {
            Ok(program) => {
                let pid = program.pid().as_raw_nonzero().get() as u32;
                (State::Running(program), pid)
            }
            Err(error) => (State::Failed(error), 0),
        };
        FirstCommand {
            state,
            pid,
            stdout: OutputWindow::default(),
            stderr: OutputWindow::default(),
            reported: Reported::default(),
            end_stored: false,
        }
    }

    /// The program, while it runs.
    pub fn program(&self) -> Option<&Program> {
        match &self.state {
            State::Running(program) => Some(program),
            _ => None,
        }
    }

    /// Whether the program runs or its last output is still being read.
    pub fn is_running(&self) -> bool {
        matches!(self.state, State::Running(_))
    }

    /// Whether the host has confirmed all output so far.
    pub fn is_confirmed(&self) -> bool {
        self.stdout.is_confirmed() && self.stderr.is_confirmed()
    }

    /// Takes the program, if it runs.
    pub fn into_program(self) -> Option<Program> {
        match self.state {
            State::Running(program) => Some(program),
            _ => None,
        }
    }

    /// The same program for a new host: offsets of its output begin at 0. `None` if it has ended.
    pub fn for_new_host(self) -> Option<FirstCommand> {
        let State::Running(_) = self.state else {
            return None;
        };
        Some(FirstCommand {
            stdout: OutputWindow::default(),
            stderr: OutputWindow::default(),
            reported: Reported::default(),
            end_stored: false,
            ..self
        })
    }

    /// Whether the host has stored the exit status.
    pub fn end_is_stored(&self) -> bool {
        self.end_stored
    }

    fn room(&self) -> [bool; 2] {
        [self.stdout.room() > 0, self.stderr.room() > 0]
    }

    /// Whether the channel, which also carries the program's input, may be read. Not while much
    /// input is unread, unless the program can't write: it may wait for a confirmation that is
    /// queued behind that input.
    pub fn takes_input(&self) -> bool {
        let State::Running(program) = &self.state else {
            return true;
        };
        let backlog = program.input_backlog();
        let blocked = self.room().contains(&false);
        backlog < INPUT_LIMIT || (blocked && backlog < MOST_INPUT)
    }

    /// Adds descriptors to the poll set, as far as there is room for output.
    pub fn interest<'a>(&'a self, set: &mut PollSet<'a>) {
        if let State::Running(program) = &self.state {
            program.interest(self.room(), Token::Main, set);
        }
    }

    /// Handles a descriptor that is ready.
    pub fn ready(&mut self, channel: Channel, space: &mut [MaybeUninit<u8>], now: u64) {
        let State::Running(program) = &mut self.state else {
            return;
        };
        let (stream, window) = match channel {
            Channel::Stdout => (Stream::Stdout, &mut self.stdout),
            Channel::Stderr => (Stream::Stderr, &mut self.stderr),
            Channel::Stdin | Channel::Peer => return program.write_input(),
        };
        let limit = window.room().min(space.len());
        if limit == 0 {
            return;
        }
        if let Output::Data(bytes) = program.read(stream, &mut space[..limit], now) {
            window.push(bytes);
        }
    }

    /// Handles input from the host.
    pub fn input(&mut self, input: ExecInput) {
        if let ExecInput::Stdin(bytes) = &input {
            self.reported.input_room = self.reported.input_room.saturating_sub(bytes.len());
        }
        if let State::Running(program) = &mut self.state {
            program.input(input);
        }
    }

    /// Bytes of input room to announce, if there are enough for an announcement.
    fn more_input_room(&self) -> Option<usize> {
        let backlog = self.program().map_or(0, Program::input_backlog);
        let room = INPUT_LIMIT.saturating_sub(backlog + self.reported.input_room);
        if self.reported.start {
            (room >= INPUT_PIECE).then_some(room)
        } else {
            // Always enough for one message.
            Some(room.max(MAX_DATA))
        }
    }

    /// Records the status if the reaped process is the first command; returns whether it is.
    pub fn reaped(&mut self, pid: Pid, status: ExitStatus, now: u64) -> bool {
        match &mut self.state {
            State::Running(program) if program.pid() == pid && !program.has_exited() => {
                program.reaped(status, now);
                true
            }
            _ => false,
        }
    }

    /// Records the exit once the output is complete; returns true when that happens. While programs
    /// are frozen, the time limit for silent outputs does not run.
    pub fn settle(&mut self, held: bool, now: u64) -> bool {
        let room = self.room().map(|room| room && !held);
        if let State::Running(program) = &mut self.state
            && let Some(status) = program.finished(room, now)
        {
            self.state = State::Ended(status);
            return true;
        }
        false
    }

    /// When [`Self::settle`] has something to do, CLOCK_MONOTONIC nanoseconds.
    pub fn deadline(&self) -> Option<u64> {
        self.program().and_then(Program::deadline)
    }

    /// Records that the host has stored output up to these offsets.
    pub fn confirm(&mut self, stdout: u64, stderr: u64) {
        self.stdout.confirm(stdout);
        self.stderr.confirm(stderr);
    }

    /// Records that the host has stored the exit status.
    pub fn confirm_end(&mut self) {
        // Ignores a confirmation of an exit that was not reported.
        self.end_stored |= self.reported.end;
    }

    /// Handles a new connection; the host has output up to these offsets.
    pub fn resume(&mut self, stdout: u64, stderr: u64) {
        self.reported = Reported::default();
        self.stdout.resume(stdout);
        self.stderr.resume(stderr);
    }

    /// Handles the loss of the connection.
    pub fn disconnected(&mut self) {
        self.stdout.disconnected();
        self.stderr.disconnected();
    }

    /// Sends the host everything it does not have yet, as far as there is room.
    pub fn send_pending(&mut self, host: &mut FrameStream) {
        if self.end_stored {
            return;
        }
        if let Some(room) = self.more_input_room() {
            self.reported.input_room += room;
            let bytes = room as u32;
            host.send(&FromGuest::MainInputRoom { bytes });
        }
        if !self.reported.start {
            self.reported.start = true;
            host.send(&match &self.state {
                State::Failed(error) => FromGuest::MainFailed(error.clone()),
                _ => FromGuest::MainStarted { pid: self.pid },
            });
            self.reported.end = matches!(self.state, State::Failed(_));
        }
        loop {
            let mut more = false;
            let windows = [
                (Stream::Stdout, &mut self.stdout),
                (Stream::Stderr, &mut self.stderr),
            ];
            for (stream, window) in windows {
                if host.has_room()
                    && let Some((offset, data)) = window.take(MAX_DATA)
                {
                    host.send(&FromGuest::MainOutput {
                        stream,
                        offset,
                        data,
                    });
                    more = true;
                }
            }
            if !more {
                break;
            }
        }
    }

    /// Reports the exit status to the host, once all output was sent.
    pub fn send_end(&mut self, host: &mut FrameStream) {
        if let State::Ended(status) = self.state
            && !self.reported.end
            && self.stdout.all_sent()
            && self.stderr.all_sent()
        {
            self.reported.end = true;
            host.send(&FromGuest::MainExited(status));
        }
    }

    /// Without a host, writes output to the console and counts it as confirmed.
    pub fn write_to(&mut self, console: &mut Console) {
        for window in [&mut self.stdout, &mut self.stderr] {
            while console.has_room()
                && let Some((_, bytes)) = window.take(4096)
            {
                console.write(&bytes);
                window.confirm(window.sent());
            }
        }
        if self.stdout.all_sent() && self.stderr.all_sent() && !self.is_running() {
            if let (State::Failed(error), false) = (&self.state, self.end_stored) {
                console.write_line("jiffy-init", error.message.as_bytes());
            }
            self.end_stored = true;
        }
    }
}
