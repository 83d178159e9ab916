//! The descriptors that one turn of the event loop polls.
//!
//! The set is built in each turn. With a few dozen descriptors that costs less than updating an
//! epoll set, and no stale registration can remain.

use alloc::vec::Vec;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::AsFd;
use rustix::io::{Errno, Result};
use rustix::process::Pid;

/// The owner of a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Token {
    /// The signalfd.
    Signals,
    /// The socket that accepts agent connections.
    Listener,
    /// The supervisor channel.
    Supervisor,
    /// The console, while output is queued for it.
    Console,
    /// The first command.
    Main(Channel),
    /// The agent connection of this id.
    Connection(u64, Channel),
    /// The detached program of this process id.
    Detached(Pid, Channel),
    /// The service of this index.
    Service(usize, Channel),
}

impl Token {
    /// Whether it is an output of a program.
    pub fn is_output(self) -> bool {
        let (Token::Main(channel)
        | Token::Connection(_, channel)
        | Token::Detached(_, channel)
        | Token::Service(_, channel)) = self
        else {
            return false;
        };
        matches!(channel, Channel::Stdout | Channel::Stderr)
    }
}

/// One of the descriptors of an owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Channel {
    /// The connection itself.
    Peer,
    /// A program's standard input.
    Stdin,
    /// A program's standard output, or its terminal.
    Stdout,
    /// A program's standard error.
    Stderr,
}

/// Descriptors with their poll flags.
#[derive(Debug, Default)]
pub struct PollSet<'a> {
    entries: Vec<PollFd<'a>>,
    tokens: Vec<Token>,
}

impl<'a> PollSet<'a> {
    /// An empty set.
    pub fn new() -> PollSet<'a> {
        PollSet::default()
    }

    /// Adds a descriptor. Errors and hang-ups are reported for empty `flags` too.
    pub fn add(&mut self, fd: &'a impl AsFd, flags: PollFlags, token: Token) {
        self.entries.push(PollFd::new(fd, flags));
        self.tokens.push(token);
    }

    /// Waits until a descriptor is ready or the timeout is over; returns the ready ones.
    ///
    /// # Errors
    ///
    /// If `poll` fails, other than by a signal.
    pub fn wait(mut self, timeout_ns: Option<u64>) -> Result<Vec<(Token, PollFlags)>> {
        let timeout = timeout_ns.map(|ns| Timespec {
            tv_sec: (ns / 1_000_000_000) as i64,
            tv_nsec: (ns % 1_000_000_000) as i64,
        });
        match poll(&mut self.entries, timeout.as_ref()) {
            Ok(_) => {}
            Err(Errno::INTR) => return Ok(Vec::new()),
            Err(error) => return Err(error),
        }
        let ready = self.entries.iter().zip(&self.tokens);
        Ok(ready
            .filter(|(entry, _)| !entry.revents().is_empty())
            .map(|(entry, token)| (*token, entry.revents()))
            .collect())
    }
}
