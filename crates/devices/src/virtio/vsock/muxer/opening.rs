//! Opens connections: of host programs to the guest, and of the guest to host programs.

use super::super::connection::{Connection, Key, Phase};
use super::super::handshake::{Handshake, Progress};
use super::super::listener::connected_ahead;
use super::super::packet::Header;
use super::super::{CONNECTION_LIMIT, tokens};
use super::{HOST_PORTS, Muxer};
use crate::virtio::poll;
use jiffy_sys::dial;
use std::io;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use vmm_sys_util::epoll::EventSet;

/// How long a host program has to send its `CONNECT` line.
const HANDSHAKE_TIME: Duration = Duration::from_secs(10);
/// How long the guest has to answer a REQUEST.
const RESPONSE_TIME: Duration = Duration::from_secs(10);
/// Pause between attempts to connect to a host program whose queue is full.
const DIAL_PAUSE: Duration = Duration::from_millis(10);
/// How long connecting to a host program may take, by such attempts or by asking: less than the 2 s
/// after which Linux gives up.
pub(super) const DIAL_TIME: Duration = Duration::from_millis(1500);
/// Pause after running out of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Most programs accepted in one turn.
const ACCEPT_BATCH: usize = 64;

impl Muxer {
    pub(super) fn accept(&mut self, now: Instant) {
        for _ in 0..ACCEPT_BATCH {
            let stream = match self.listener.accept() {
                Ok(stream) => stream,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
                Err(error) => {
                    // Descriptors or memory ran out: the program keeps waiting.
                    self.log_host_error(&error);
                    self.paused = true;
                    self.watch_listener();
                    self.deadlines.set(tokens::LISTENER, now + ACCEPT_PAUSE);
                    return;
                }
            };
            self.out_of_descriptors = false;
            if self.is_full() {
                tracing::debug!("vsock: host program refused, {CONNECTION_LIMIT} connections");
                continue;
            }
            let token = tokens::numbered(&mut self.next_number);
            if let Err(error) = self.poll.add(&stream, token, poll::any_edge()) {
                self.log_host_error(&error);
                continue;
            }
            self.handshakes.insert(token, Handshake { stream });
            self.deadlines.set(token, now + HANDSHAKE_TIME);
            // Most programs have sent their line by now.
            self.advance_handshake(token, EventSet::IN, now);
        }
    }

    pub(super) fn advance_handshake(&mut self, token: u64, events: EventSet, now: Instant) {
        let Some(handshake) = self.handshakes.get_mut(&token) else {
            return;
        };
        let port = match handshake.advance() {
            // The program will not send any more.
            Progress::Waiting if events.intersects(EventSet::READ_HANG_UP | EventSet::HANG_UP) => {
                None
            }
            Progress::Waiting => return,
            Progress::Connect(port) => Some(port),
            Progress::Refused => None,
        };
        self.deadlines.cancel(token);
        let Some(Handshake { stream }) = self.handshakes.remove(&token) else {
            return;
        };
        match port {
            Some(port) => self.request(stream, port, now),
            None => tracing::debug!("vsock: a host program sent no CONNECT line"),
        }
    }

    fn request(&mut self, stream: UnixStream, guest_port: u32, now: Instant) {
        let key = self.free_key(guest_port);
        if let Err(error) = self.poll.modify(&stream, key.token(), poll::any_edge()) {
            return self.log_host_error(&error);
        }
        tracing::debug!(
            host_port = key.host_port,
            guest_port,
            "vsock: connecting to the guest"
        );
        self.connections.insert(key, Connection::from_host(stream));
        self.deadlines.set(key.token(), now + RESPONSE_TIME);
        self.enqueue(key);
    }

    /// A host port that is not in use with this guest port. The search ends, because there are far
    /// fewer connections than ports.
    fn free_key(&mut self, guest_port: u32) -> Key {
        loop {
            let key = Key {
                host_port: self.next_host_port,
                guest_port,
            };
            self.next_host_port += 1;
            if !HOST_PORTS.contains(&self.next_host_port) {
                self.next_host_port = HOST_PORTS.start;
            }
            if !self.connections.contains_key(&key) {
                return key;
            }
        }
    }

    pub(super) fn connect(&mut self, key: Key, request: &Header, now: Instant) {
        if self.is_full() || key.host_port == u32::MAX {
            return self.refuse(key);
        }
        match self.connect_to_host(key) {
            Ok(Some(stream)) => {
                if let Err(error) = self.poll.add(&stream, key.token(), poll::any_edge()) {
                    self.log_host_error(&error);
                    return self.refuse(key);
                }
                let connection = Connection::from_guest(request, stream);
                self.connections.insert(key, connection);
                self.enqueue(key);
            }
            Ok(None) => {
                let connection = Connection::dialing(request, self.dial_calls());
                self.connections.insert(key, connection);
                self.deadlines.set(key.token(), now + self.dial_time);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let connection = Connection::dialing(request, self.dial_calls());
                self.connections.insert(key, connection);
                self.deadlines.set(key.token(), now + DIAL_PAUSE);
            }
            Err(error) => {
                self.note_refusal(key, &error);
                self.refuse(key);
            }
        }
    }

    /// Number of attempts to connect to a host program whose queue is full.
    fn dial_calls(&self) -> u16 {
        (self.dial_time.as_millis() / DIAL_PAUSE.as_millis()) as u16
    }

    /// Connects to the program of a host port. `None` if the connection was asked for, and its
    /// answer comes later.
    ///
    /// # Errors
    ///
    /// `WouldBlock` if it is to be tried again later. Any other error is final.
    fn connect_to_host(&mut self, key: Key) -> io::Result<Option<UnixStream>> {
        if let Some(stream) = connected_ahead(&self.path, key.host_port) {
            return Ok(Some(stream));
        }
        if self.dialer.is_by_name() {
            return dial::connect(&dial::socket_of_port(&self.path, key.host_port)).map(Some);
        }
        // The guest may request and reset connections faster than they are answered.
        if self.asked.len() >= CONNECTION_LIMIT {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        if self.dialer.ask(key.host_port)? {
            self.refuse_asked();
            let polled = self.dialer.channel().map_or(Ok(()), |channel| {
                self.poll.add(channel, tokens::DIALER, EventSet::IN)
            });
            // The answer must not be taken for that of a later request.
            polled.inspect_err(|_| self.dialer.close())?;
        }
        self.asked.push_back(key);
        Ok(None)
    }

    /// Takes the answers for connections that were asked for.
    pub(super) fn take_answers(&mut self, now: Instant) {
        loop {
            match self.dialer.answer() {
                Ok(Some(answer)) => {
                    if let Some(key) = self.asked.pop_front() {
                        self.dialed(key, answer, now);
                    }
                }
                Ok(None) => return,
                Err(error) => {
                    tracing::debug!(%error, "vsock: nobody connects to host programs now");
                    return self.refuse_asked();
                }
            }
        }
    }

    /// No answer comes for what was asked for.
    fn refuse_asked(&mut self) {
        for key in std::mem::take(&mut self.asked) {
            if self.is_dialing(key) {
                self.reset(key);
            }
        }
    }

    fn is_dialing(&self, key: Key) -> bool {
        let connection = self.connections.get(&key);
        connection.is_some_and(|it| matches!(it.phase(), Phase::Dialing { .. }))
    }

    pub(super) fn dial_again(&mut self, key: Key, now: Instant) {
        if self.asked.contains(&key) {
            tracing::debug!(port = key.host_port, "vsock: jiffyd did not answer in time");
            return self.reset(key);
        }
        match self.connect_to_host(key) {
            Ok(Some(stream)) => self.dialed(key, Ok(stream), now),
            Ok(None) => self.deadlines.set(key.token(), now + self.dial_time),
            Err(error) => self.dialed(key, Err(error), now),
        }
    }

    /// Handles the result of an attempt; ignores that of a connection which has ended meanwhile.
    fn dialed(&mut self, key: Key, dialed: io::Result<UnixStream>, now: Instant) {
        if !self.is_dialing(key) {
            return;
        }
        let dialed = dialed.and_then(|stream| {
            self.poll.add(&stream, key.token(), poll::any_edge())?;
            Ok(stream)
        });
        let Some(connection) = self.connections.get_mut(&key) else {
            return;
        };
        match dialed {
            Ok(stream) => {
                connection.dialed(stream);
                self.deadlines.cancel(key.token());
                self.enqueue(key);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && connection.count_call() => {
                self.deadlines.set(key.token(), now + DIAL_PAUSE);
            }
            Err(error) => {
                self.note_refusal(key, &error);
                self.reset(key);
            }
        }
    }
}
