//! Credential helpers for the process of `jiffy-origins` that is confined and can't execute them.
//!
//! That process sends a request with a socket attached to the one that started it, which forks a
//! process for each request. This one runs the helper, and writes its output to the socket.

use super::request::HelperRequest;
use jiffy_registry::{HelperOutput, RunHelper, run_helper};
use jiffy_sys::fds;
use jiffy_sys::fork::{Child, Fork, fork};
use jiffy_sys::mutex::lock;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::ExitStatus;
use std::sync::Mutex;

/// Most helpers that run at a time; each belongs to a thread of the pager that waits.
const MAX_RUNNING: usize = 64;
/// Longest request, bytes. A request is one message.
const MAX_REQUEST: usize = 4096;

/// The confined process's end.
#[derive(Debug)]
pub struct Helpers(pub(super) Mutex<OwnedFd>);

/// The other end, in the process that started it.
#[derive(Debug)]
pub struct Broker(OwnedFd);

/// Both ends.
///
/// # Errors
///
/// If `socketpair` fails.
pub fn pair() -> io::Result<(Helpers, Broker)> {
    let (here, there) = socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?;
    Ok((Helpers(Mutex::new(here)), Broker(there)))
}

impl RunHelper for Helpers {
    fn run(&self, name: &str, registry: &str) -> Result<HelperOutput, String> {
        let request = HelperRequest {
            name: name.to_owned(),
            registry: registry.to_owned(),
        };
        let answered = || -> io::Result<Result<HelperOutput, String>> {
            let (mut answer, theirs) = UnixStream::pair()?;
            let line = serde_json::to_vec(&request)?;
            fds::send_with_fds(lock(&self.0).as_fd(), &line, &[theirs.as_fd()])?;
            drop(theirs);
            let mut text = Vec::new();
            answer.read_to_end(&mut text)?;
            Ok(serde_json::from_slice(&text)?)
        };
        answered().unwrap_or_else(|error| Err(format!("the helper {name} was not run: {error}")))
    }
}

impl Broker {
    /// Runs helpers until the confined process has ended; returns its status.
    ///
    /// # Errors
    ///
    /// If `poll` fails, or the status can't be read.
    pub fn serve(self, confined: Child) -> io::Result<ExitStatus> {
        let mut running: Vec<Child> = Vec::new();
        loop {
            let mut events = vec![
                PollFd::new(&confined, PollFlags::IN),
                PollFd::new(&self.0, PollFlags::IN),
            ];
            events.extend(
                running
                    .iter()
                    .map(|child| PollFd::new(child, PollFlags::IN)),
            );
            match poll(&mut events, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            let ready: Vec<bool> = events
                .iter()
                .map(|event| !event.revents().is_empty())
                .collect();
            drop(events);
            if ready[0] {
                // Helpers that still run are killed: nobody waits for their answers.
                return confined.wait();
            }
            let mut ended = ready[2..].iter();
            // An ended process is reaped when it is dropped.
            running.retain(|_| ended.next() != Some(&true));
            if ready[1] {
                match self.request() {
                    Ok(Some((request, answer))) if running.len() < MAX_RUNNING => {
                        running.extend(start(&request, answer));
                    }
                    // Its socket is closed without an answer.
                    Ok(_) => {}
                    Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                        return confined.wait();
                    }
                    Err(error) => {
                        tracing::warn!(%error, "a request for a credential helper is not valid")
                    }
                }
            }
        }
    }

    /// The next request, if it is valid. `UnexpectedEof` if the other end is closed.
    pub(super) fn request(&self) -> io::Result<Option<(HelperRequest, UnixStream)>> {
        let (mut line, mut sockets) = ([0; MAX_REQUEST], Vec::new());
        let length = fds::recv_with_fds(&self.0, &mut line, &mut sockets)?;
        if length == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let request = serde_json::from_slice(&line[..length]).ok();
        let answer = sockets.pop().map(UnixStream::from);
        Ok(request.zip(answer))
    }
}

/// Runs a helper in a process of its own; `None` if there is none.
fn start(request: &HelperRequest, mut answer: UnixStream) -> Option<Child> {
    match fork() {
        Ok(Fork::Parent(child)) => Some(child),
        Ok(Fork::Child) => {
            let output = run_helper(&request.name, &request.registry);
            let written = serde_json::to_vec(&output).map(|text| answer.write_all(&text));
            std::process::exit(written.is_err().into())
        }
        Err(error) => {
            tracing::warn!(%error, "a credential helper can't be run");
            None
        }
    }
}

#[cfg(test)]
mod tests;
