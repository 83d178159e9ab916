//! A connection of the host: its request and the work on it.

use super::{cpus, stat};
use crate::poll::{Channel, PollSet, Token};
use crate::program::process::{INPUT_LIMIT, Output, Program};
use crate::stream::{FrameStream, Received};
use alloc::{format, string::String};
use core::mem::MaybeUninit;
use jiffy_wire::agent::{
    Command, CopyDone, CopyFrame, Done, ExecInput, ExecOutput, ExitStatus, OLDEST, Request,
    StartError, StartFailure, Stream, VERSION, is_supported,
};
use rustix::event::PollFlags;
use rustix::fd::OwnedFd;
use rustix::process::Pid;

/// Time limit for a connection's request, nanoseconds.
const REQUEST_NS: u64 = 10_000_000_000;
/// Time limit for the peer to read the end of its answer, nanoseconds.
const ANSWER_NS: u64 = 30_000_000_000;

/// A connection and its work.
#[derive(Debug)]
pub struct Connection {
    id: u64,
    stream: FrameStream,
    work: Work,
}

#[derive(Debug)]
enum Work {
    /// Waits for the request.
    Waiting { give_up_at: u64 },
    /// Runs a program.
    Exec(Program),
    /// Programs are frozen for this connection.
    Holding,
    /// The answer is queued; the connection is closed once it is sent.
    Answered { give_up_at: u64 },
}

/// What a connection asks of the event loop.
#[derive(Debug)]
pub enum Need {
    /// Nothing.
    Nothing,
    /// Close it.
    Close,
    /// Fork a process that serves this request on the connection.
    Copy(Request),
    /// Start a program: [`Connection::exec`] starts it, [`Connection::refuse_exec`] refuses.
    Exec(Command),
    /// End the VM.
    Shutdown {
        /// Time between SIGTERM and SIGKILL, milliseconds.
        grace_ms: u32,
    },
    /// Freeze programs; [`Connection::hold`] or [`Connection::answer`] reports the result.
    Quiesce {
        /// Drop caches.
        drop_caches: bool,
    },
    /// Send a signal to the first command; [`Connection::answer`] reports the result.
    SignalMain(i32),
}

impl Connection {
    /// A connection that was just accepted.
    pub fn new(id: u64, socket: OwnedFd, now: u64) -> Connection {
        Connection {
            id,
            stream: FrameStream::new(socket),
            work: Work::Waiting {
                give_up_at: now + REQUEST_NS,
            },
        }
    }

    /// The connection's number in the event loop.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The connection's socket and undecoded bytes, for another process.
    pub fn into_parts(self) -> (OwnedFd, alloc::vec::Vec<u8>) {
        self.stream.into_parts()
    }

    /// Takes the connection's program, if it runs one.
    pub fn into_program(self) -> Option<Program> {
        match self.work {
            Work::Exec(program) => Some(program),
            _ => None,
        }
    }

    /// The connection's program, if it runs one.
    pub fn program(&self) -> Option<&Program> {
        match &self.work {
            Work::Exec(program) => Some(program),
            _ => None,
        }
    }

    fn takes_input(&self) -> bool {
        match &self.work {
            Work::Waiting { .. } => true,
            Work::Exec(program) => program.input_backlog() < INPUT_LIMIT,
            // Waits only for the peer to close the connection.
            Work::Holding => true,
            Work::Answered { .. } => false,
        }
    }

    /// Adds the connection's descriptors to the poll set.
    pub fn interest<'a>(&'a self, set: &mut PollSet<'a>) {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, self.takes_input());
        flags.set(PollFlags::OUT, self.stream.unsent() > 0);
        set.add(
            &self.stream,
            flags,
            Token::Connection(self.id, Channel::Peer),
        );
        self.interest_of_program(set);
    }

    /// Adds the program's descriptors to the poll set.
    pub fn interest_of_program<'a>(&'a self, set: &mut PollSet<'a>) {
        if let Work::Exec(program) = &self.work {
            let id = self.id;
            let room = [self.stream.has_room(); 2];
            program.interest(room, |channel| Token::Connection(id, channel), set);
        }
    }

    /// When [`Self::expired`] may become true or [`Self::settle`] has something to do,
    /// CLOCK_MONOTONIC nanoseconds.
    pub fn deadline(&self) -> Option<u64> {
        match &self.work {
            Work::Waiting { give_up_at } | Work::Answered { give_up_at } => Some(*give_up_at),
            Work::Exec(program) => program.deadline(),
            Work::Holding => None,
        }
    }

    /// Deadline of the request, if it has not arrived, CLOCK_MONOTONIC nanoseconds.
    pub fn waits_until(&self) -> Option<u64> {
        match &self.work {
            Work::Waiting { give_up_at } => Some(*give_up_at),
            _ => None,
        }
    }

    /// Whether the peer was too slow to send its request or to read the answer.
    pub fn expired(&self, now: u64) -> bool {
        match &self.work {
            Work::Waiting { give_up_at } | Work::Answered { give_up_at } => now >= *give_up_at,
            Work::Exec(_) | Work::Holding => false,
        }
    }

    /// Records that programs are frozen for this connection.
    pub fn hold(&mut self) {
        self.work = Work::Holding;
    }

    /// Answers that all programs are frozen.
    pub fn answer_quiesced(&mut self) {
        self.stream.send(&Done::Ok);
    }

    /// Restarts timeouts after a thaw, because nothing was read meanwhile.
    pub fn thawed(&mut self, now: u64) {
        if let Work::Waiting { give_up_at } = &mut self.work {
            *give_up_at = now + REQUEST_NS;
        }
    }

    /// Handles a descriptor that is ready.
    pub fn ready(
        &mut self,
        channel: Channel,
        flags: PollFlags,
        space: &mut [MaybeUninit<u8>],
        now: u64,
    ) -> Need {
        match channel {
            Channel::Peer => self.peer_ready(flags, space, now),
            Channel::Stdin => {
                if let Work::Exec(program) = &mut self.work {
                    program.write_input();
                }
                // Input may be undecoded for lack of room.
                self.decode(now)
            }
            Channel::Stdout => self.output(Stream::Stdout, space, now),
            Channel::Stderr => self.output(Stream::Stderr, space, now),
        }
    }

    fn peer_ready(&mut self, flags: PollFlags, space: &mut [MaybeUninit<u8>], now: u64) -> Need {
        if flags.contains(PollFlags::OUT) && self.stream.flush().is_err() {
            return Need::Close;
        }
        if !flags.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
            return Need::Nothing;
        }
        if !self.takes_input() {
            // Errors and hang-ups are reported for empty flags too.
            let gone = flags.intersects(PollFlags::HUP | PollFlags::ERR);
            return if gone { Need::Close } else { Need::Nothing };
        }
        match self.stream.receive(space) {
            Received::Data => self.decode(now),
            Received::Nothing => Need::Nothing,
            Received::Closed => Need::Close,
        }
    }

    fn decode(&mut self, now: u64) -> Need {
        while self.takes_input() {
            if let Work::Holding = &self.work {
                // The peer must not send anything more: close the connection.
                return Need::Close;
            }
            if let Work::Exec(program) = &mut self.work {
                match self.stream.next::<ExecInput>() {
                    Ok(Some(input)) => program.input(input),
                    Ok(None) => break,
                    Err(_) => return Need::Close,
                }
            } else {
                match self.stream.next::<Request>() {
                    Ok(Some(request)) => match self.begin(request, now) {
                        Need::Nothing => {}
                        need => return need,
                    },
                    Ok(None) => break,
                    Err(_) => return Need::Close,
                }
            }
        }
        Need::Nothing
    }

    fn begin(&mut self, request: Request, now: u64) -> Need {
        if !is_supported(request.version()) {
            let message = format!(
                "protocol version {} was requested; this jiffy-init supports versions {OLDEST} to {VERSION}",
                request.version()
            );
            self.refuse(&request, message, now);
            return Need::Nothing;
        }
        match request {
            Request::Exec { command, .. } => return Need::Exec(command),
            Request::Stat { .. } => {
                self.stream.send(&stat::read());
                self.close_when_sent(now);
            }
            Request::Shutdown { grace_ms, .. } => {
                self.answer(Ok(()), now);
                return Need::Shutdown { grace_ms };
            }
            Request::SignalMain { signal, .. } => return Need::SignalMain(signal),
            Request::SetCpus { count, .. } => {
                self.answer(cpus::set_online(cpus::FOLDER, count), now);
            }
            Request::Quiesce { drop_caches, .. } => return Need::Quiesce { drop_caches },
            request => return Need::Copy(request),
        }
        Need::Nothing
    }

    /// Starts a program and decodes input that arrived with the request.
    pub fn exec(&mut self, command: &Command, now: u64) -> Need {
        match Program::start(command) {
            Ok(program) => {
                let pid = program.pid().as_raw_nonzero().get() as u32;
                self.stream.send(&ExecOutput::Started { pid });
                self.work = Work::Exec(program);
                self.decode(now)
            }
            Err(error) => {
                self.stream.send(&ExecOutput::Failed(error));
                self.close_when_sent(now);
                Need::Nothing
            }
        }
    }

    /// Refuses to start a program.
    pub fn refuse_exec(&mut self, message: String, now: u64) {
        self.stream.send(&ExecOutput::Failed(StartError {
            kind: StartFailure::Other,
            message,
        }));
        self.close_when_sent(now);
    }

    /// Refuses a request with the answer type of that request.
    pub(super) fn refuse(&mut self, request: &Request, message: String, now: u64) {
        match request {
            Request::Exec { .. } => self.stream.send(&ExecOutput::Failed(StartError {
                kind: StartFailure::Invalid,
                message,
            })),
            Request::CopyIn { .. } => {
                self.stream.send(&CopyDone {
                    entries: 0,
                    error: Some(message),
                });
            }
            Request::CopyOut { .. } | Request::Changes { .. } => {
                self.stream.send(&CopyFrame::Failed { message });
            }
            // A `Stat` has no error, so the connection is closed.
            Request::Stat { .. } => {}
            Request::Shutdown { .. }
            | Request::SignalMain { .. }
            | Request::Quiesce { .. }
            | Request::SetCpus { .. } => {
                self.stream.send(&Done::Error(message));
            }
        }
        self.close_when_sent(now);
    }

    /// Answers a request without a stream.
    pub fn answer(&mut self, result: Result<(), String>, now: u64) {
        self.stream.send(&match result {
            Ok(()) => Done::Ok,
            Err(message) => Done::Error(message),
        });
        self.close_when_sent(now);
    }

    fn close_when_sent(&mut self, now: u64) {
        self.work = Work::Answered {
            give_up_at: now + ANSWER_NS,
        };
    }

    fn output(&mut self, stream: Stream, space: &mut [MaybeUninit<u8>], now: u64) -> Need {
        if let Work::Exec(program) = &mut self.work
            && self.stream.has_room()
            && let Output::Data(bytes) = program.read(stream, space, now)
        {
            self.stream.send(&ExecOutput::Output {
                stream,
                data: bytes.to_vec(),
            });
        }
        Need::Nothing
    }

    /// Records the status if the reaped process is this program; returns whether it is.
    pub fn reaped(&mut self, pid: Pid, status: ExitStatus, now: u64) -> bool {
        match &mut self.work {
            Work::Exec(program) if program.pid() == pid && !program.has_exited() => {
                program.reaped(status, now);
                true
            }
            _ => false,
        }
    }

    /// Ends an exec whose output is complete and sends what can be sent. Returns true once there is
    /// nothing left to do. While programs are frozen, the time limit for silent outputs does not
    /// run.
    pub fn settle(&mut self, held: bool, now: u64) -> bool {
        let room = [self.stream.has_room() && !held; 2];
        if let Work::Exec(program) = &mut self.work
            && let Some(status) = program.finished(room, now)
        {
            self.stream.send(&ExecOutput::Exited(status));
            self.close_when_sent(now);
        }
        if self.stream.flush().is_err() {
            return true;
        }
        matches!(self.work, Work::Answered { .. }) && self.stream.unsent() == 0
    }
}
