//! All connections of the device, and the sockets of host programs that have no connection yet or
//! any more.

mod opening;

use super::connection::{Connection, Key, Outgoing, Phase, Verdict};
use super::deadlines::Deadlines;
use super::handshake::Handshake;
use super::listener::Listener;
use super::outbox::Outbox;
use super::packet::{Buffers, HOST_CID, Header, Op, TYPE_STREAM};
use super::state::{SavedConnection, VsockState};
use super::tokens;
use super::{BUFFER, CONNECTION_LIMIT};
use crate::virtio::poll::PollSet;
use jiffy_sys::dial::Dialer;
use jiffy_sys::epoll::Event;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vmm_sys_util::epoll::EventSet;

/// Number of pending RSTs without a connection at which the device stops taking packets until the
/// guest has taken some (Virtio 1.3 §5.10.6.1).
const RESET_LIMIT: usize = 256;
/// Host ports for connections of host programs, apart from the ports that programs choose.
const HOST_PORTS: std::ops::Range<u32> = 1 << 30..1 << 31;

/// A RST for a connection that is not in the table (any more).
#[derive(Debug, Clone, Copy)]
struct Reset {
    /// The context id that the guest addressed: the host's, or one that does not exist.
    cid: u64,
    /// The guest's socket type: Linux ignores a RST with another type.
    kind: u16,
    key: Key,
}

/// A socket to which bytes of an ended connection are still to be sent.
struct Drain {
    stream: UnixStream,
    outbox: Outbox,
}

/// Connections by their ports, and the order in which they send.
pub struct Muxer {
    guest_cid: u64,
    /// The context id the guest had before it was restored.
    former_cid: u64,
    path: PathBuf,
    /// Connects to host programs.
    dialer: Dialer,
    /// How long that may take.
    dial_time: Duration,
    /// Connections that were asked for and not answered yet, in order.
    asked: VecDeque<Key>,
    poll: Arc<PollSet>,
    listener: Listener,
    /// Whether programs are accepted.
    open: bool,
    /// Descriptors ran out; programs wait for a moment.
    paused: bool,
    connections: HashMap<Key, Connection>,
    handshakes: HashMap<u64, Handshake>,
    drains: HashMap<u64, Drain>,
    /// Connections with a packet for the guest, each once, in order.
    ready: VecDeque<Key>,
    resets: VecDeque<Reset>,
    deadlines: Deadlines,
    next_number: u32,
    next_host_port: u32,
    out_of_descriptors: bool,
}

impl Muxer {
    /// Takes over the listener at `path`, and watches it in `poll`; accepts no program yet.
    ///
    /// # Errors
    ///
    /// If epoll_ctl(2) fails.
    pub fn new(
        guest_cid: u64,
        path: PathBuf,
        listener: Listener,
        poll: Arc<PollSet>,
    ) -> io::Result<Muxer> {
        poll.add(&listener, tokens::LISTENER, EventSet::empty())?;
        Ok(Muxer {
            guest_cid,
            former_cid: guest_cid,
            dialer: Dialer::new(&path),
            dial_time: opening::DIAL_TIME,
            asked: VecDeque::new(),
            path,
            poll,
            listener,
            open: false,
            paused: false,
            connections: HashMap::new(),
            handshakes: HashMap::new(),
            drains: HashMap::new(),
            ready: VecDeque::new(),
            resets: VecDeque::new(),
            deadlines: Deadlines::default(),
            next_number: 0,
            next_host_port: HOST_PORTS.start,
            out_of_descriptors: false,
        })
    }

    /// Replaces the time that connecting to a host program may take.
    #[cfg(test)]
    pub fn dial_for(&mut self, time: Duration) {
        self.dial_time = time;
    }

    /// The context ids that packets from the guest may have as source: its own, and, until it has
    /// read that, the one it had before it was restored.
    pub fn source_cids(&self) -> [u64; 2] {
        [self.guest_cid, self.former_cid]
    }

    /// The connections that the guest knows, for a snapshot.
    pub fn saved(&self) -> Vec<SavedConnection> {
        let known = self
            .connections
            .iter()
            .filter(|(_, c)| c.is_known_to_guest());
        let mut saved: Vec<SavedConnection> = known
            .map(|(key, _)| *key)
            .chain(self.resets.iter().map(|reset| reset.key))
            .map(|key| SavedConnection {
                host_port: key.host_port,
                guest_port: key.guest_port,
            })
            .collect();
        saved.sort_unstable();
        saved.dedup();
        saved.truncate(2 * CONNECTION_LIMIT);
        saved
    }

    /// Queues a RST for each connection that a snapshot had.
    pub fn reset_saved(&mut self, saved: &VsockState) {
        self.former_cid = saved.cid;
        self.resets
            .extend(saved.connections.iter().map(|ports| Reset {
                cid: HOST_CID,
                kind: TYPE_STREAM,
                key: Key {
                    host_port: ports.host_port,
                    guest_port: ports.guest_port,
                },
            }));
    }

    /// The driver was reset and has forgotten its connections: ends them.
    pub fn forget_guest(&mut self) {
        let known = self
            .connections
            .iter()
            .filter(|(_, c)| c.is_known_to_guest());
        let known: Vec<Key> = known.map(|(key, _)| *key).collect();
        for key in known {
            self.remove(key);
        }
        self.resets.clear();
    }

    /// Sets whether host programs are accepted, or wait.
    pub fn set_open(&mut self, open: bool) {
        if self.open != open {
            self.open = open;
            self.watch_listener();
        }
    }

    fn watch_listener(&self) {
        let events = match self.open && !self.paused {
            true => EventSet::IN,
            false => EventSet::empty(),
        };
        if let Err(error) = self.poll.modify(&self.listener, tokens::LISTENER, events) {
            tracing::error!(%error, "the vsock listener cannot be watched");
        }
    }

    /// Before the device ends: gives programs until `until` to read what the guest has sent them.
    pub fn linger(&mut self, until: Instant) {
        self.set_open(false);
        let mut events = [Event::default(); 64];
        loop {
            let mut waiting = false;
            for connection in self.connections.values_mut() {
                waiting |= connection.flush();
            }
            for drain in self.drains.values_mut() {
                waiting |= drain.outbox.flush(&drain.stream).is_ok() && !drain.outbox.is_empty();
            }
            let left = until.saturating_duration_since(Instant::now());
            if !waiting || left.is_zero() || self.poll.wait(Some(left), &mut events).is_err() {
                return;
            }
        }
    }

    /// The next time at which [`Muxer::expire`] has something to do.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.next()
    }

    /// Moves all deadlines by the time that the device was paused.
    pub fn shift_deadlines(&mut self, by: Duration) {
        self.deadlines.shift(by);
    }

    fn is_full(&self) -> bool {
        self.connections.len() + self.handshakes.len() + self.drains.len() >= CONNECTION_LIMIT
    }

    // The host side.

    /// Handles `events` of a watched socket.
    pub fn on_socket(&mut self, token: u64, events: EventSet, now: Instant) {
        if token == tokens::LISTENER {
            self.accept(now);
        } else if token == tokens::DIALER {
            self.take_answers(now);
        } else if self.handshakes.contains_key(&token) {
            self.advance_handshake(token, events, now);
        } else if self.drains.contains_key(&token) {
            self.advance_drain(token);
        } else {
            let key = Key::from_token(token);
            if let Some(connection) = self.connections.get_mut(&key) {
                connection.on_socket(events);
                self.enqueue(key);
            }
        }
    }

    fn advance_drain(&mut self, token: u64) {
        if let Some(drain) = self.drains.get_mut(&token)
            && (drain.outbox.flush(&drain.stream).is_err() || drain.outbox.is_empty())
        {
            self.drains.remove(&token);
        }
    }

    /// Handles every deadline that is over.
    pub fn expire(&mut self, now: Instant) {
        while let Some(token) = self.deadlines.take_expired(now) {
            if token == tokens::LISTENER {
                self.paused = false;
                self.watch_listener();
            } else if self.handshakes.remove(&token).is_some() {
                tracing::debug!("vsock: a host program sent no CONNECT line in time");
            } else {
                let key = Key::from_token(token);
                match self.connections.get(&key).map(Connection::phase) {
                    Some(Phase::Dialing { .. }) => self.dial_again(key, now),
                    Some(Phase::Requested) => {
                        tracing::debug!(?key, "vsock: the guest did not answer");
                        self.reset(key);
                    }
                    _ => {}
                }
            }
        }
    }

    // The guest side.

    /// Whether the device must not take packets now, because it owes too many answers.
    pub fn is_congested(&self) -> bool {
        self.resets.len() >= RESET_LIMIT
    }

    /// Handles a checked packet of the guest; its payload is in `buffers`.
    pub fn receive(&mut self, header: &Header, buffers: &Buffers<'_>, now: Instant) {
        let key = Key {
            host_port: header.dst_port,
            guest_port: header.src_port,
        };
        let op = Op::from_number(header.op);
        if header.dst_cid != HOST_CID || header.kind != TYPE_STREAM {
            // The packet does not concern the stream with the same ports.
            if op != Some(Op::Rst) {
                self.resets.push_back(Reset {
                    cid: header.dst_cid,
                    kind: header.kind,
                    key,
                });
            }
            return;
        }
        if header.src_cid != self.guest_cid {
            // The packet was sent before the guest knew its new context id, and it would wait for
            // an answer in vain. So it is refused at once, and its program can try again.
            if op != Some(Op::Rst) {
                self.refuse(key);
            }
            return;
        }
        let Some(op) = op else {
            self.refuse(key);
            return self.remove(key);
        };
        if op == Op::Request && self.connections.get(&key).is_some_and(Connection::is_over) {
            self.remove(key);
        }
        match self.connections.get_mut(&key) {
            Some(connection) => {
                let before = connection.phase();
                let verdict = connection.handle(op, header, buffers, key.host_port);
                if before == Phase::Requested && connection.phase() == Phase::Open {
                    self.deadlines.cancel(key.token());
                }
                match verdict {
                    Verdict::Keep => self.enqueue(key),
                    Verdict::Close => self.remove(key),
                    Verdict::Reset => self.reset(key),
                }
            }
            None if op == Op::Request => self.connect(key, header, now),
            None if op == Op::Rst => {}
            None => self.refuse(key),
        }
    }

    /// Puts a connection that has a packet for the guest at the end of the queue.
    fn enqueue(&mut self, key: Key) {
        if let Some(connection) = self.connections.get_mut(&key)
            && !connection.queued
            && connection.has_packet()
        {
            connection.queued = true;
            self.ready.push_back(key);
        }
    }

    /// Whether there may be a packet for the guest.
    pub fn has_packet(&self) -> bool {
        !self.resets.is_empty() || !self.ready.is_empty()
    }

    /// Makes one packet for the guest, with its payload in `buffers`; connections take turns.
    pub fn next_packet(&mut self, buffers: &Buffers<'_>) -> Option<Header> {
        if let Some(reset) = self.resets.pop_front() {
            return Some(Header {
                src_cid: reset.cid,
                kind: reset.kind,
                op: Op::Rst as u16,
                ..self.header(reset.key)
            });
        }
        while let Some(key) = self.ready.pop_front() {
            let Some(connection) = self.connections.get_mut(&key) else {
                continue;
            };
            connection.queued = false;
            let spoken = connection.next_packet(buffers);
            self.enqueue(key);
            if let Some(Outgoing {
                op,
                flags,
                len,
                fwd_cnt,
            }) = spoken
            {
                return Some(Header {
                    op: op as u16,
                    flags,
                    len,
                    fwd_cnt,
                    buf_alloc: BUFFER,
                    ..self.header(key)
                });
            }
        }
        None
    }

    fn header(&self, key: Key) -> Header {
        Header {
            src_cid: HOST_CID,
            dst_cid: self.guest_cid,
            src_port: key.host_port,
            dst_port: key.guest_port,
            kind: TYPE_STREAM,
            ..Header::default()
        }
    }

    // The end of connections.

    fn refuse(&mut self, key: Key) {
        self.resets.push_back(Reset {
            cid: HOST_CID,
            kind: TYPE_STREAM,
            key,
        });
    }

    fn reset(&mut self, key: Key) {
        if self
            .connections
            .get(&key)
            .is_some_and(Connection::is_known_to_guest)
        {
            self.refuse(key);
        }
        self.remove(key);
    }

    /// Removes a connection from the table. What its program has not read yet is still delivered,
    /// because the guest was told that it was taken.
    fn remove(&mut self, key: Key) {
        let Some(connection) = self.connections.remove(&key) else {
            return;
        };
        self.deadlines.cancel(key.token());
        if connection.queued {
            self.ready.retain(|other| *other != key);
        }
        if let Some((stream, outbox)) = connection.into_rest() {
            let token = tokens::numbered(&mut self.next_number);
            let events = EventSet::OUT | EventSet::EDGE_TRIGGERED;
            match self.poll.modify(&stream, token, events) {
                Ok(()) => {
                    self.drains.insert(token, Drain { stream, outbox });
                }
                Err(error) => self.log_host_error(&error),
            }
        }
    }

    fn note_refusal(&mut self, key: Key, error: &io::Error) {
        match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                tracing::debug!(port = key.host_port, "vsock: no host program listens");
            }
            io::ErrorKind::NotConnected => {
                tracing::debug!(port = key.host_port, "vsock: {error}");
            }
            io::ErrorKind::WouldBlock => {
                tracing::debug!(
                    port = key.host_port,
                    "vsock: the host program accepts no more connections"
                );
            }
            _ => self.log_host_error(error),
        }
    }

    /// Logs, once, that the host is at fault and not the guest or a program.
    fn log_host_error(&mut self, error: &io::Error) {
        if !std::mem::replace(&mut self.out_of_descriptors, true) {
            tracing::warn!(%error, "vsock: connections with host programs fail");
        }
    }

    /// Bytes that are held for host programs.
    #[cfg(any(test, feature = "testing"))]
    pub fn held_bytes(&self) -> usize {
        let connections = self.connections.values().map(Connection::held_bytes);
        let drains = self.drains.values().map(|drain| drain.outbox.len());
        connections.chain(drains).sum()
    }

    /// The number of all sockets that count for the limit.
    #[cfg(any(test, feature = "testing"))]
    pub fn connection_count(&self) -> usize {
        self.connections.len() + self.handshakes.len() + self.drains.len()
    }
}
