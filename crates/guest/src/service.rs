//! Services: starts and restarts them, and forwards their output line by line.

use crate::poll::{Channel, PollSet, Token};
use crate::program::process::{Output, Program};
use alloc::{format, string::String, vec::Vec};
use core::mem::MaybeUninit;
use jiffy_wire::agent::{Command, ExitStatus, Stream};
use jiffy_wire::guest::{self, Restart};
use rustix::process::Pid;

/// First delay before a restart, nanoseconds; it doubles each time.
const FIRST_WAIT_NS: u64 = 100_000_000;
/// Longest delay, nanoseconds. A run of this length resets the delay.
const LONGEST_WAIT_NS: u64 = 10_000_000_000;
/// Longest line, bytes; longer lines are split.
const LONGEST_LINE: usize = 8 * 1024;

/// A line of the log, with the name of its service.
pub type Line = (String, Vec<u8>);

/// A service.
#[derive(Debug)]
pub struct Service {
    index: usize,
    name: String,
    command: Command,
    restart: Restart,
    backoff: Backoff,
    state: State,
    /// Output since the last newline, per stream.
    partial: [Vec<u8>; 2],
}

#[derive(Debug)]
enum State {
    Stopped { start_at: Option<u64> },
    Running { program: Program, since: u64 },
}

impl Service {
    /// A service that must be started at once.
    pub fn new(index: usize, given: &guest::Service) -> Service {
        let command = Command {
            stdin: false,
            tty: None,
            ..given.command.clone()
        };
        Service {
            index,
            name: given.name.clone(),
            command,
            restart: given.restart,
            backoff: Backoff::default(),
            state: State::Stopped { start_at: Some(0) },
            partial: Default::default(),
        }
    }

    /// Starts the service if it is due.
    pub fn advance(&mut self, now: u64, log: &mut Vec<Line>) {
        let State::Stopped {
            start_at: Some(start_at),
        } = self.state
        else {
            return;
        };
        if now < start_at {
            return;
        }
        match Program::start(&self.command) {
            Ok(program) => {
                self.note(
                    log,
                    format!("started, process {}", program.pid().as_raw_nonzero()),
                );
                self.state = State::Running {
                    program,
                    since: now,
                };
            }
            Err(error) => {
                self.note(log, format!("cannot be started: {}", error.message));
                self.schedule(true, 0, now, log);
            }
        }
    }

    /// When [`Self::advance`] or [`Self::settle`] has something to do, CLOCK_MONOTONIC nanoseconds.
    pub fn deadline(&self) -> Option<u64> {
        match &self.state {
            State::Stopped { start_at } => *start_at,
            State::Running { program, .. } => program.deadline(),
        }
    }

    /// Adds the service's descriptors to the poll set.
    pub fn interest<'a>(&'a self, set: &mut PollSet<'a>) {
        if let State::Running { program, .. } = &self.state {
            program.interest(
                [true; 2],
                |channel| Token::Service(self.index, channel),
                set,
            );
        }
    }

    /// Handles a descriptor that is ready.
    pub fn ready(
        &mut self,
        channel: Channel,
        space: &mut [MaybeUninit<u8>],
        now: u64,
        log: &mut Vec<Line>,
    ) {
        let State::Running { program, .. } = &mut self.state else {
            return;
        };
        let (stream, partial) = match channel {
            Channel::Stdout => (Stream::Stdout, &mut self.partial[0]),
            Channel::Stderr => (Stream::Stderr, &mut self.partial[1]),
            Channel::Stdin | Channel::Peer => return,
        };
        if let Output::Data(bytes) = program.read(stream, space, now) {
            cut_lines(partial, bytes, |line| log.push((self.name.clone(), line)));
        }
    }

    /// Records the status if the reaped process is this service; returns whether it is.
    pub fn reaped(&mut self, pid: Pid, status: ExitStatus, now: u64) -> bool {
        match &mut self.state {
            State::Running { program, .. } if program.pid() == pid && !program.has_exited() => {
                program.reaped(status, now);
                true
            }
            _ => false,
        }
    }

    /// Records the exit once the output is complete. While programs are frozen, the time limit for
    /// silent outputs does not run.
    pub fn settle(&mut self, held: bool, now: u64, log: &mut Vec<Line>) {
        let State::Running { program, since } = &mut self.state else {
            return;
        };
        let Some(status) = program.finished([!held; 2], now) else {
            return;
        };
        let ran_ns = now.saturating_sub(*since);
        for partial in &mut self.partial {
            if !partial.is_empty() {
                log.push((self.name.clone(), core::mem::take(partial)));
            }
        }
        match status {
            ExitStatus::Code(code) => self.note(log, format!("ended with status {code}")),
            ExitStatus::Signal(signal) => self.note(log, format!("was ended by signal {signal}")),
        }
        self.schedule(status != ExitStatus::Code(0), ran_ns, now, log);
    }

    fn schedule(&mut self, failed: bool, ran_ns: u64, now: u64, log: &mut Vec<Line>) {
        let again = match self.restart {
            Restart::Always => true,
            Restart::OnFailure => failed,
            Restart::Never => false,
        };
        let wait_ns = self.backoff.next(ran_ns);
        if again {
            self.note(log, format!("starts again in {} ms", wait_ns / 1_000_000));
        }
        self.state = State::Stopped {
            start_at: again.then_some(now + wait_ns),
        };
    }

    /// Prevents further starts, because the VM shuts down.
    pub fn prevent_restart(&mut self) {
        self.restart = Restart::Never;
        if let State::Stopped { start_at } = &mut self.state {
            *start_at = None;
        }
    }

    /// The running program.
    pub fn program(&self) -> Option<&Program> {
        match &self.state {
            State::Running { program, .. } => Some(program),
            State::Stopped { .. } => None,
        }
    }

    fn note(&self, log: &mut Vec<Line>, text: String) {
        log.push((
            self.name.clone(),
            format!("[jiffy-init] {text}").into_bytes(),
        ));
    }
}

/// Delay before the next start.
#[derive(Debug, Default)]
pub struct Backoff {
    last_ns: u64,
}

impl Backoff {
    /// The delay after a run of this length, nanoseconds.
    pub fn next(&mut self, ran_ns: u64) -> u64 {
        self.last_ns = if self.last_ns == 0 || ran_ns >= LONGEST_WAIT_NS {
            FIRST_WAIT_NS
        } else {
            (self.last_ns * 2).min(LONGEST_WAIT_NS)
        };
        self.last_ns
    }
}

/// Splits output into lines; an incomplete line stays in `partial`.
fn cut_lines(partial: &mut Vec<u8>, bytes: &[u8], mut emit: impl FnMut(Vec<u8>)) {
    for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
        for part in piece.chunks(LONGEST_LINE) {
            partial.extend_from_slice(part);
            if partial.last() == Some(&b'\n') {
                partial.pop();
                emit(core::mem::take(partial));
            } else if partial.len() >= LONGEST_LINE {
                emit(core::mem::take(partial));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec;

    #[test]
    fn restart_backoff_doubles_to_its_limit_and_resets() {
        let mut backoff = Backoff::default();
        let waits: Vec<u64> = (0..9).map(|_| backoff.next(1) / 1_000_000).collect();
        assert_eq!(
            waits,
            [100, 200, 400, 800, 1600, 3200, 6400, 10_000, 10_000]
        );
        assert_eq!(backoff.next(LONGEST_WAIT_NS), FIRST_WAIT_NS);
    }

    #[test]
    fn long_log_lines_are_split() {
        let mut partial = Vec::new();
        let mut lines = Vec::new();
        let mut bytes = vec![b'x'; LONGEST_LINE + 10];
        bytes.extend(b"\nshort\nrest");
        cut_lines(&mut partial, &bytes, |line| lines.push(line.len()));
        assert_eq!(lines, [LONGEST_LINE, 10, 5]);
        assert_eq!(partial, b"rest");
    }

    proptest! {
        #[test]
        fn log_lines_do_not_depend_on_read_boundaries(
            bytes in proptest::collection::vec(prop_oneof![Just(b'\n'), any::<u8>()], 0..300),
            cut in 1usize..40,
        ) {
            let mut partial = Vec::new();
            let mut lines: Vec<Vec<u8>> = Vec::new();
            for piece in bytes.chunks(cut) {
                cut_lines(&mut partial, piece, |line| lines.push(line));
            }
            lines.push(partial);
            let expected: Vec<Vec<u8>> = bytes.split(|b| *b == b'\n').map(<[u8]>::to_vec).collect();
            prop_assert_eq!(lines, expected);
        }
    }
}
