//! Sends stdin, signals and the terminal's size to the command.

use super::fd::Waited;
use super::signals::{self, Signals};
use super::terminal;
use crate::client::{Client, FrameWriter, vm_path};
use crate::failure::{Failure, Result};
use jiffy_wire::agent::ExecInput;
use jiffy_wire::api::Vm;
use jiffy_wire::frame::{self, MAX_DATA};
use std::future::pending;
use std::io;
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// A second Ctrl-C within this time leaves the session; a signal that could not be sent for this
/// time, because stdin fills the connection, does so too.
const IMPATIENCE: Duration = Duration::from_secs(1);
/// Ctrl-P Ctrl-Q, as in docker.
const DETACH_KEYS: [u8; 2] = [0x10, 0x11];

/// How the user left the session.
#[derive(Debug, PartialEq, Eq)]
pub enum Left {
    /// With the detach keys.
    Detached,
    /// With this signal, twice, or once if it could not be sent or is not forwarded.
    GaveUp(i32),
}

/// What a session forwards.
pub struct Options<'a> {
    /// Forward stdin.
    pub stdin: bool,
    /// The command runs on a terminal.
    pub tty: bool,
    /// That terminal is this process's, and raw.
    pub raw: bool,
    /// Forward signals; otherwise the first one leaves the session.
    pub signals: bool,
    /// Whether to recognise the detach keys.
    pub detach_keys: bool,
    /// The VM whose first command this is: when stdin fills the connection, signals are
    /// sent by `POST /v1/vms/{vm}/kill`.
    pub vm: Option<&'a str>,
    /// The client for that request.
    pub client: &'a Client,
}

/// The input side of a session.
pub struct Input<'a> {
    frames: FrameWriter,
    signals: Signals,
    stdin: Option<Waited>,
    options: Options<'a>,
    /// Encoded frames not yet sent.
    unsent: Vec<u8>,
    sent: usize,
    /// The node has closed its reading side; the output side receives its last message.
    closed: bool,
    last_interrupt: Option<Instant>,
    /// A signal that waits behind unsent stdin, and when to give up on it.
    waiting: Option<(i32, Instant)>,
    /// Part of stdin was sent; how much of it the command has read is unknown.
    stdin_sent: bool,
    keys: Keys,
}

impl<'a> Input<'a> {
    /// Nothing is read or sent yet.
    pub fn new(frames: FrameWriter, signals: Signals, options: Options<'a>) -> Input<'a> {
        Input {
            frames,
            signals,
            stdin: options.stdin.then(|| Waited::new(rustix::stdio::stdin())),
            keys: Keys::default(),
            options,
            unsent: Vec::new(),
            sent: 0,
            closed: false,
            last_interrupt: None,
            waiting: None,
            stdin_sent: false,
        }
    }

    /// Forwards until the user leaves. The output side receives the end of the command.
    ///
    /// # Errors
    ///
    /// If stdin can't be read.
    pub async fn forward(&mut self, reader_gone: &Notify) -> Result<Left> {
        let mut buffer = vec![0; MAX_DATA];
        // The command may have been started with the size of another terminal, and this
        // terminal may have been resized since the request.
        if self.options.raw {
            self.resize();
        }
        loop {
            // If stdin is always ready and the node has closed the connection, nothing
            // below waits: yield, so that the output side can read the last message.
            tokio::task::coop::consume_budget().await;
            // At most one full frame is queued, so that back-pressure reaches stdin.
            let hungry = self.sent == self.unsent.len() && !self.closed;
            let event = tokio::select! {
                biased;
                signal = self.signals.next() => Event::Signal(signal),
                () = reader_gone.notified() => Event::ReaderGone,
                signal = wait_until_overdue(self.waiting) => return Ok(Left::GaveUp(signal)),
                sent = self.frames.send_some(&self.unsent[self.sent..]),
                    if self.sent < self.unsent.len() => Event::Sent(sent),
                read = read(&mut self.stdin, &mut buffer), if hungry => Event::Stdin(read),
            };
            match event {
                Event::Signal(signal) => {
                    if let Some(left) = self.signal(signal).await {
                        return Ok(left);
                    }
                }
                // The signal that the command would have got as the writer of that pipe.
                Event::ReaderGone => {
                    if let Some(left) = self.signal(signals::PIPE).await {
                        return Ok(left);
                    }
                }
                Event::Sent(Ok(count)) if count > 0 => self.sent(count),
                Event::Sent(_) => self.close(),
                Event::Stdin(Ok(0)) => {
                    self.stdin = None;
                    self.queue(&ExecInput::StdinClosed);
                }
                Event::Stdin(Ok(count)) => {
                    let typed = &buffer[..count];
                    if self.options.detach_keys && self.keys.detach(typed) {
                        return Ok(Left::Detached);
                    }
                    self.stdin_sent = true;
                    self.queue(&ExecInput::Stdin(typed.to_vec()));
                }
                Event::Stdin(Err(error)) => {
                    return Err(Failure::io("stdin can't be read", error));
                }
            }
        }
    }

    /// Forwards a signal, or leaves at the second Ctrl-C; if none is forwarded, at the first signal.
    async fn signal(&mut self, signal: i32) -> Option<Left> {
        match signal {
            signals::WINDOW => self.resize(),
            signals::CONTINUED => {
                if self.options.raw {
                    terminal::make_raw_again();
                    self.resize();
                }
            }
            _ if !self.options.signals => return Some(Left::GaveUp(signal)),
            _ => {
                if signal == signals::INTERRUPT {
                    let now = Instant::now();
                    let again = self
                        .last_interrupt
                        .replace(now)
                        .is_some_and(|last| now - last <= IMPATIENCE);
                    if again {
                        return Some(Left::GaveUp(signal));
                    }
                }
                self.send_signal(signal);
            }
        }
        None
    }

    fn send_signal(&mut self, signal: i32) {
        let stuck = self.sent < self.unsent.len();
        // SIGPIPE comes once, and early: bytes that will be stuck may be in transit.
        let stuck_soon = signal == signals::PIPE && self.stdin_sent;
        match self.options.vm {
            // It would never arrive behind stdin that the command does not read.
            Some(vm) if stuck || stuck_soon => {
                let client = self.options.client.clone();
                let path = vm_path(vm, &format!("/kill?signal={signal}"));
                tokio::spawn(async move {
                    let _ = client.post::<Vm>(&path).await;
                });
            }
            vm => {
                self.queue(&ExecInput::Signal(signal));
                // There is no other way to send it; closing the connection ends the command, too.
                if vm.is_none() && stuck {
                    self.waiting
                        .get_or_insert((signal, Instant::now() + IMPATIENCE));
                }
            }
        }
    }

    fn resize(&mut self) {
        if let Some(size) = terminal::size()
            && self.options.tty
        {
            self.queue(&ExecInput::Resize(size));
        }
    }

    fn queue(&mut self, message: &ExecInput) {
        if !self.closed {
            // None of these messages is longer than a frame.
            let _ = frame::encode(message, &mut self.unsent);
        }
    }

    fn sent(&mut self, count: usize) {
        self.sent += count;
        if self.sent == self.unsent.len() {
            self.unsent.clear();
            self.sent = 0;
            self.waiting = None;
        }
    }

    fn close(&mut self) {
        self.closed = true;
        self.waiting = None;
        self.unsent.clear();
        self.sent = 0;
    }
}

enum Event {
    Signal(i32),
    ReaderGone,
    Sent(io::Result<usize>),
    Stdin(io::Result<usize>),
}

/// Waits until the waiting signal has waited long enough; returns it.
async fn wait_until_overdue(waiting: Option<(i32, Instant)>) -> i32 {
    match waiting {
        Some((signal, until)) => {
            tokio::time::sleep_until(until.into()).await;
            signal
        }
        None => pending().await,
    }
}

/// Reads stdin; waits forever if there is none.
async fn read(stdin: &mut Option<Waited>, buffer: &mut [u8]) -> io::Result<usize> {
    match stdin {
        Some(stdin) => stdin.read(buffer).await,
        None => pending().await,
    }
}

/// Recognises the detach keys. The first key is forwarded at once, so that it also works for the
/// command.
#[derive(Default)]
struct Keys {
    matched: bool,
}

impl Keys {
    fn detach(&mut self, typed: &[u8]) -> bool {
        for key in typed {
            if self.matched && *key == DETACH_KEYS[1] {
                return true;
            }
            self.matched = *key == DETACH_KEYS[0];
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn detach_keys_are_found_across_reads() {
        let mut keys = Keys::default();
        assert!(!keys.detach(b"ls\r\x10"));
        assert!(keys.detach(b"\x11"));
        let mut keys = Keys::default();
        assert!(!keys.detach(b"\x10x\x11"));
        assert!(keys.detach(b"a\x10\x10\x11b"));
    }
}
