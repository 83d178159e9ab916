//! What outlives an activation: the socket to the server, and the messages on it.

use super::channel::{Channel, Received, Sent};
use super::in_flight::Table;
use super::request::{self, IN_HEADER, OUT_HEADER};
use crate::virtio::poll::{self, PollSet};
use jiffy_sys::epoll::Event;
use std::io;
use std::time::{Duration, Instant};
use thiserror::Error;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

const WAKEUP: u64 = 0;
const SERVER: u64 = 1;
/// Tokens of events from this one on are free.
pub(super) const TOKENS: u64 = 2;

/// The id of the monitor's own messages (`jiffy_wire::files::OWN`); requests of the guest have others.
const OWN: u64 = 0;
/// How long the monitor waits for an answer to its own message.
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(30);

/// Why the server has not answered a message of the monitor.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ExchangeError {
    /// The device was not paused, or its worker has panicked.
    #[error("its device is not paused")]
    Running,
    /// There is no server.
    #[error("its server has ended")]
    NoServer,
    /// No answer came.
    #[error("its server does not answer")]
    Silent,
    /// The server refused the request, with this error number.
    #[error("its server refused, with error {0}")]
    Refused(i32),
    /// The answer is malformed, or the message too long.
    #[error("its server does not understand the monitor")]
    Malformed,
    /// The socket can't be used.
    #[error("the socket to its server can't be used")]
    Socket(#[source] io::Error),
}

/// State that outlives an activation.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) channel: Option<Channel>,
    pub(super) in_flight: Table,
    pub(super) poll: PollSet,
    /// Signalled when the worker must stop.
    wakeup: EventFd,
    /// Room for the longest message, one for each direction.
    pub(super) request: Vec<u8>,
    pub(super) answer: Vec<u8>,
    /// How many messages were sent.
    pub(super) sent: u64,
}

impl Link {
    /// `longest` is that of messages, bytes.
    pub(super) fn new(channel: Option<Channel>, longest: usize) -> io::Result<Link> {
        let link = Link {
            channel,
            in_flight: Table::default(),
            poll: PollSet::new()?,
            wakeup: EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?,
            request: vec![0; longest],
            answer: vec![0; longest],
            sent: 0,
        };
        link.poll.add(&link.wakeup, WAKEUP, poll::ring_edge())?;
        if let Some(channel) = &link.channel {
            link.poll.add(&channel.as_fd(), SERVER, poll::any_edge())?;
        }
        Ok(link)
    }

    pub(super) fn wakeup(&self) -> io::Result<EventFd> {
        self.wakeup.try_clone()
    }

    /// Waits for any event, at most so long.
    pub(super) fn wait(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.poll
            .wait(timeout, &mut [Event::default(); 4])
            .map(drop)
    }

    pub(super) fn send(&mut self, message: &[u8]) -> Sent {
        let Some(channel) = &mut self.channel else {
            return Sent::Never;
        };
        let sent = channel.send(message);
        self.sent += u64::from(sent == Sent::Yes);
        sent
    }

    /// Sends a message of the monitor itself and waits for its answer; returns the results.
    pub(super) fn exchange(
        &mut self,
        opcode: u32,
        arguments: &[&[u8]],
    ) -> Result<Vec<u8>, ExchangeError> {
        let arguments = arguments.concat();
        let length = IN_HEADER + arguments.len();
        if length > self.request.len() {
            return Err(ExchangeError::Malformed);
        }
        let mut message = vec![0; IN_HEADER];
        message[..4].copy_from_slice(&(length as u32).to_le_bytes());
        message[4..8].copy_from_slice(&opcode.to_le_bytes());
        request::set_id(&mut message, OWN);
        message.extend(arguments);
        let end = Instant::now() + EXCHANGE_TIMEOUT;
        loop {
            match self.send(&message) {
                Sent::Yes => break,
                Sent::Later => self.wait_until(end)?,
                Sent::Failed => return Err(ExchangeError::Malformed),
                Sent::Never => return Err(ExchangeError::NoServer),
            }
        }
        let mut answer = std::mem::take(&mut self.answer);
        let results = self.results(&mut answer, end);
        self.answer = answer;
        results
    }

    fn results(&mut self, answer: &mut [u8], end: Instant) -> Result<Vec<u8>, ExchangeError> {
        loop {
            let channel = self.channel.as_mut().ok_or(ExchangeError::NoServer)?;
            let length = match channel.receive(answer) {
                Received::Message(length) => length,
                Received::Nothing => {
                    self.wait_until(end)?;
                    continue;
                }
                Received::End => return Err(ExchangeError::NoServer),
            };
            let answer = answer.get(..length).ok_or(ExchangeError::Malformed)?;
            if request::id_of(answer) != OWN {
                // To a request that the guest has given up.
                continue;
            }
            let (header, results) = answer
                .split_first_chunk::<OUT_HEADER>()
                .ok_or(ExchangeError::Malformed)?;
            let [_, _, _, _, a, b, c, d, ..] = *header;
            return match i32::from_le_bytes([a, b, c, d]) {
                0 => Ok(results.to_vec()),
                error => Err(ExchangeError::Refused(error.wrapping_neg())),
            };
        }
    }

    fn wait_until(&self, end: Instant) -> Result<(), ExchangeError> {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ExchangeError::Silent);
        }
        self.wait(Some(left)).map_err(ExchangeError::Socket)
    }
}
