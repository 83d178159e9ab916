//! The thread that passes requests to the server and answers to the guest.

use super::channel::{Received, Sent};
use super::in_flight::InFlight;
use super::link::Link;
use super::request::{self, Kind, OUT_HEADER, Request};
use super::{PRIORITY_QUEUE, QUEUE_SIZE};
use crate::GuestMemory;
use crate::virtio::device::ActiveQueue;
use crate::virtio::poll;
use crate::virtio::queue::Chain;
use crate::virtio::queue::ring::Ring;
use jiffy_sys::log_limit::LogLimit;
use rustix::io::Errno;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long a device that stops waits for the server's answers. Later the guest gets EIO for them.
pub(super) const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// The links have the numbers below.
const DOORBELLS: u64 = super::link::TOKENS;

/// Everything that the thread owns.
pub(super) struct Worker {
    pub(super) link: Link,
    /// By index.
    pub(super) rings: [Ring; 2],
    pub(super) memory: Arc<GuestMemory>,
    pub(super) stop: Arc<AtomicBool>,
    /// [`STOP_TIMEOUT`].
    pub(super) stop_timeout: Duration,
    pub(super) log: Arc<LogLimit>,
}

/// How far the worker came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    /// There is nothing to do until an event comes.
    Done,
    /// There may be more.
    More,
}

impl Worker {
    /// Serves the queues until it is stopped; returns them with their positions.
    pub(super) fn run(mut self) -> (Link, Vec<ActiveQueue>) {
        if let Err(error) = self.serve() {
            tracing::error!(%error, "the worker of a shared folder can't continue");
        }
        self.finish();
        for ring in &self.rings {
            let _ = self.link.poll.remove(&ring.active().doorbell);
        }
        let queues = self.rings.into_iter().map(Ring::into_active).collect();
        (self.link, queues)
    }

    fn serve(&mut self) -> io::Result<()> {
        for (token, ring) in (DOORBELLS..).zip(&self.rings) {
            let doorbell = &ring.active().doorbell;
            self.link.poll.add(doorbell, token, poll::ring_edge())?;
        }
        // Requests may have come before the worker ran.
        while !self.stop.load(Ordering::SeqCst) {
            let answers = self.pass_answers();
            let requests = self.pass_requests();
            for ring in &mut self.rings {
                ring.notify(&self.memory);
            }
            let more = answers == Turn::More || requests == Turn::More;
            self.link.wait(more.then_some(Duration::ZERO))?;
        }
        Ok(())
    }

    /// Waits for the answers to all requests that the server has.
    fn finish(&mut self) {
        let end = Instant::now() + self.stop_timeout;
        while !self.link.in_flight.is_empty() {
            let more = self.pass_answers() == Turn::More;
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                tracing::warn!(
                    "the server of a shared folder did not answer in time; the guest gets EIO"
                );
                self.fail_all(Errno::IO);
            } else if !more && !self.link.in_flight.is_empty() {
                // After an error, the loop receives until the time is over.
                let _ = self.link.wait(Some(left));
            }
        }
        for ring in &mut self.rings {
            ring.notify(&self.memory);
        }
    }

    /// Passes requests to the server, those of the priority queue first.
    fn pass_requests(&mut self) -> Turn {
        for queue in [PRIORITY_QUEUE, super::REQUEST_QUEUE] {
            let index = usize::from(queue);
            self.rings[index].disable_notification(&self.memory);
            for _ in 0..QUEUE_SIZE {
                if !self.link.in_flight.has_room() {
                    // An answer makes room.
                    return Turn::Done;
                }
                let Some(chain) = self.rings[index].pop(&self.memory) else {
                    if self.rings[index].enable_notification(&self.memory) {
                        return Turn::More;
                    }
                    break;
                };
                if !self.pass_request(queue, chain) {
                    // The socket becomes writable.
                    self.rings[index].put_back();
                    return Turn::Done;
                }
            }
        }
        Turn::Done
    }

    /// Passes one request; false if the socket is full.
    fn pass_request(&mut self, queue: u16, chain: Chain) -> bool {
        let head = chain.head();
        let mut message = std::mem::take(&mut self.link.request);
        let read = request::read(&self.memory, chain, &mut message);
        let sent = match read {
            Ok((request, _)) if request.kind == Kind::Ignored => {
                self.give_back(queue, head, 0);
                true
            }
            Ok((request, length)) => self.send(queue, head, request, &mut message[..length]),
            Err(refused) => {
                if self.log.admits() {
                    tracing::warn!(%refused, "a guest sent a malformed request to a shared folder");
                }
                self.give_back(queue, head, 0);
                true
            }
        };
        self.link.request = message;
        sent
    }

    fn send(&mut self, queue: u16, head: u16, request: Request, message: &mut [u8]) -> bool {
        let Some(id) = self.link.in_flight.next_id() else {
            return false;
        };
        let Request {
            kind,
            id: guests,
            answer,
        } = request;
        request::set_id(message, id);
        let in_flight = InFlight {
            queue,
            head,
            id: guests,
            answer,
        };
        match self.link.send(message) {
            Sent::Later => return false,
            Sent::Yes if kind == Kind::Answered => self.link.in_flight.insert(id, in_flight),
            Sent::Yes => self.give_back(queue, head, 0),
            Sent::Failed => self.fail(in_flight, Errno::NOMEM),
            Sent::Never => self.fail(in_flight, Errno::NOTCONN),
        }
        true
    }

    /// Passes the server's answers to the guest.
    fn pass_answers(&mut self) -> Turn {
        let mut message = std::mem::take(&mut self.link.answer);
        let mut turn = Turn::More;
        for _ in 0..QUEUE_SIZE {
            let Some(channel) = &mut self.link.channel else {
                turn = Turn::Done;
                break;
            };
            match channel.receive(&mut message) {
                Received::Message(length) => {
                    // A longer one is truncated, which `answer` detects.
                    let kept = length.min(message.len());
                    self.answer(&mut message[..kept]);
                }
                Received::Nothing => {
                    turn = Turn::Done;
                    break;
                }
                Received::End => {
                    self.fail_all(Errno::NOTCONN);
                    turn = Turn::Done;
                    break;
                }
            }
        }
        self.link.answer = message;
        turn
    }

    /// Passes one answer to the guest. An answer without a request came too late, and is dropped.
    fn answer(&mut self, answer: &mut [u8]) {
        let Some(in_flight) = self.link.in_flight.take(request::id_of(answer)) else {
            return;
        };
        let stated = answer
            .first_chunk()
            .map(|bytes| u32::from_le_bytes(*bytes) as usize);
        if answer.len() < OUT_HEADER || stated != Some(answer.len()) {
            tracing::error!(
                bytes = answer.len(),
                "the server of a shared folder sent a malformed answer"
            );
            return self.fail(in_flight, Errno::IO);
        }
        request::set_id(answer, in_flight.id);
        match request::write_answer(&self.memory, &in_flight.answer, answer) {
            Some(written) => self.give_back(in_flight.queue, in_flight.head, written),
            // The guest gave a request too little room.
            None => self.fail(in_flight, Errno::INVAL),
        }
    }

    /// Answers a request with an error.
    fn fail(&mut self, in_flight: InFlight, errno: Errno) {
        let answer = request::error_answer(in_flight.id, errno.raw_os_error());
        let written = request::write_answer(&self.memory, &in_flight.answer, &answer);
        self.give_back(in_flight.queue, in_flight.head, written.unwrap_or(0));
    }

    fn fail_all(&mut self, errno: Errno) {
        while let Some(in_flight) = self.link.in_flight.take_any() {
            self.fail(in_flight, errno);
        }
    }

    fn give_back(&mut self, queue: u16, head: u16, length: u32) {
        self.rings[usize::from(queue)].give_back(&self.memory, head, length);
    }
}
