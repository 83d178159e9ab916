//! A VMM that uses a disk: its requests and their answers.

use super::listen;
use crate::sentence::bounded;
use jiffy_store::Stop;
use jiffy_sys::log_limit::LogLimit;
use jiffy_sys::mutex::lock;
use jiffy_wire::disk::{ChunkAnswer, ChunkRequest, LINE_MAX};
use jiffy_wire::lines::{self, Lines};
use rustix::event::PollFlags;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard};

/// Most requests of one VMM in flight; no more are read until one is answered.
const MAX_PENDING: usize = 16;

/// A VMM, as seen by the server.
pub(super) struct DiskPeer {
    answers: Arc<Answers>,
    input: Lines,
    /// It understands [`ChunkAnswer::Bytes`].
    pub takes_bytes: bool,
    /// The process, if it is known.
    pub pid: Option<u32>,
    /// Limits the messages that this process causes.
    pub log: Arc<LogLimit>,
    /// It has not sent a line yet.
    at_begin: bool,
}

/// A line of a VMM.
pub(super) enum Line {
    Request(ChunkRequest),
    /// The connection is this process's.
    OnBehalfOf(u32),
}

/// Sends answers to a VMM, from any thread.
pub(super) struct Answers {
    stream: UnixStream,
    /// Given up when the VMM has gone; this ends its requests.
    stop: Stop,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Requests in flight.
    pending: usize,
    /// Bytes that the socket has not taken yet.
    output: Vec<u8>,
}

impl Drop for DiskPeer {
    fn drop(&mut self) {
        self.answers.stop.cancel();
        // The descriptor stays open as long as threads have answers to send, so the socket is shut
        // down.
        let _ = self.answers.stream.shutdown(std::net::Shutdown::Both);
    }
}

impl DiskPeer {
    /// `stream` must be non-blocking.
    pub fn new(stream: UnixStream, pid: Option<u32>, log: Arc<LogLimit>) -> DiskPeer {
        DiskPeer {
            answers: Arc::new(Answers {
                stream,
                stop: Stop::new(),
                state: Mutex::default(),
            }),
            input: Lines::new(LINE_MAX),
            takes_bytes: false,
            pid,
            log,
            at_begin: true,
        }
    }

    /// The events to poll for.
    pub fn interest(&self) -> PollFlags {
        let state = self.answers.state();
        let mut interest = PollFlags::empty();
        if !state.output.is_empty() {
            interest |= PollFlags::OUT;
        } else if state.pending < MAX_PENDING {
            interest |= PollFlags::IN;
        }
        interest
    }

    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.answers.stream.as_fd()
    }

    pub fn stream(&self) -> &UnixStream {
        &self.answers.stream
    }

    /// Reads and writes as much as possible; false at the end of the connection.
    pub fn exchange(&mut self, hung_up: bool) -> bool {
        let mut state = self.answers.state();
        if state.flush(&self.answers.stream).is_err() {
            return false;
        }
        if !state.output.is_empty() || state.pending >= MAX_PENDING {
            return !hung_up;
        }
        drop(state);
        let mut buffer = [0; LINE_MAX];
        match (&self.answers.stream).read(&mut buffer) {
            Ok(0) => return false,
            Ok(bytes) => self.input.push(&buffer[..bytes]),
            Err(error) if would_block(&error) => {}
            Err(_) => return false,
        }
        true
    }

    /// Writes as much as possible; false when the connection is over.
    pub fn flush(&self) -> bool {
        self.answers.state().flush(&self.answers.stream).is_ok()
    }

    /// The next line; `None` if no whole one has arrived, or too many requests are in flight.
    ///
    /// # Errors
    ///
    /// If the VMM violates the protocol: the line is too long or no request.
    pub fn next_line(&mut self) -> Result<Option<Line>, String> {
        if self.answers.state().pending >= MAX_PENDING {
            return Ok(None);
        }
        let too_long = |error| format!("the line is not a request: {error}");
        let line = self.input.next_line().map_err(too_long)?;
        let Some(line) = line else { return Ok(None) };
        if std::mem::take(&mut self.at_begin)
            && let Some(pid) = listen::on_behalf(&self.answers.stream, &line)
        {
            self.pid = Some(pid);
            return Ok(Some(Line::OnBehalfOf(pid)));
        }
        serde_json::from_slice(&line)
            .map(|request| Some(Line::Request(request)))
            .map_err(|error| bounded(&format!("the line is not a request: {error}")))
    }

    /// Counts a request as in flight, and returns where its answer is to be sent.
    pub fn begin_request(&self) -> Arc<Answers> {
        self.answers.state().pending += 1;
        self.answers.clone()
    }
}

impl Answers {
    /// Given up when the VMM has gone.
    pub fn stop(&self) -> Stop {
        self.stop.clone()
    }

    /// Sends an answer, at once if the socket takes it. Returns whether the server has to handle
    /// this VMM again: there is more to write, or further requests may be read.
    pub fn send_answer(&self, answer: &ChunkAnswer, bytes: &[u8]) -> bool {
        let mut state = self.state();
        let was_full = state.pending >= MAX_PENDING;
        state.pending -= 1;
        let line = lines::encode(answer).expect("an answer is plain data");
        state.output.extend(line);
        state.output.extend(bytes);
        // The server notices a connection that is over.
        let flushed = state.flush(&self.stream);
        was_full || flushed.is_err() || !state.output.is_empty()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl State {
    fn flush(&mut self, mut stream: &UnixStream) -> io::Result<()> {
        while !self.output.is_empty() {
            match stream.write(&self.output) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(bytes) => drop(self.output.drain(..bytes)),
                Err(error) if would_block(&error) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

fn would_block(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}
