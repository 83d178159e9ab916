//! A connection to the control socket: one request per line and one answer per line, in order.

use jiffy_wire::lines::{self, Lines};
use jiffy_wire::pager::{PagerRequest, PagerResponse};
use rustix::event::PollFlags;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

/// Bytes of a request, at most.
const MAX_LINE: usize = 64 << 10;

pub(super) struct Client {
    stream: UnixStream,
    input: Lines,
    output: Vec<u8>,
    /// A request is in progress; its answer is sent later.
    busy: bool,
    closing: bool,
}

impl Client {
    /// The stream is non-blocking.
    pub fn new(stream: UnixStream) -> Client {
        Client {
            stream,
            input: Lines::new(MAX_LINE),
            output: Vec::new(),
            busy: false,
            closing: false,
        }
    }

    /// No request is in progress.
    pub fn is_idle(&self) -> bool {
        !self.busy && self.output.is_empty()
    }

    /// The events to poll for. Requests of a client that does not read its answers are not read.
    pub fn interest(&self) -> PollFlags {
        if !self.output.is_empty() {
            PollFlags::OUT
        } else if self.busy {
            PollFlags::empty()
        } else {
            PollFlags::IN
        }
    }

    /// Reads and writes as much as possible; false when the connection is over.
    pub fn exchange(&mut self) -> bool {
        if !self.flush() {
            return false;
        }
        if self.busy || !self.output.is_empty() {
            // Woken without a requested event: the client has hung up.
            return self.is_connected();
        }
        let mut buffer = [0; 4096];
        match self.stream.read(&mut buffer) {
            Ok(0) => return false,
            Ok(bytes) => self.input.push(&buffer[..bytes]),
            Err(error) if should_retry(&error) => {}
            Err(_) => return false,
        }
        true
    }

    fn is_connected(&self) -> bool {
        let mut fds = [rustix::event::PollFd::new(&self.stream, PollFlags::empty())];
        let now = rustix::event::Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let _ = rustix::event::poll(&mut fds, Some(&now));
        !fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
    }

    /// The next whole request; a malformed one is answered at once.
    pub fn next_request(&mut self) -> Option<PagerRequest> {
        while !self.busy && !self.closing {
            let line = match self.input.next_line() {
                Ok(line) => line?,
                Err(error) => {
                    self.closing = true;
                    self.answer(&PagerResponse::Error(format!(
                        "the line is not a request: {error}"
                    )));
                    return None;
                }
            };
            match serde_json::from_slice(&line) {
                Ok(request) => return Some(request),
                Err(error) => self.answer(&PagerResponse::Error(format!(
                    "the line is not a request: {error}"
                ))),
            }
        }
        None
    }

    pub fn answer(&mut self, response: &PagerResponse) {
        let line = lines::encode(response).expect("a response is plain data");
        self.output.extend(line);
    }

    /// The answer is sent later, by [`Client::answer_late`].
    pub fn wait(&mut self) {
        self.busy = true;
    }

    pub fn answer_late(&mut self, problem: Option<String>) {
        self.busy = false;
        self.answer(&match problem {
            None => PagerResponse::Ok,
            Some(problem) => PagerResponse::Error(problem),
        });
    }

    /// Writes as much as possible; false when the connection is over.
    pub fn flush(&mut self) -> bool {
        while !self.output.is_empty() {
            match self.stream.write(&self.output) {
                Ok(0) => return false,
                Ok(bytes) => drop(self.output.drain(..bytes)),
                Err(error) if should_retry(&error) => return true,
                Err(_) => return false,
            }
        }
        !self.closing
    }
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

fn should_retry(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}
