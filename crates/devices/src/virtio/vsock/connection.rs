//! One stream between a guest port and a host program.
//!
//! ```text
//!  guest: REQUEST                      host program: CONNECT N
//!        │                                     │ REQUEST owed
//!        ▼   queue full                        ▼
//!   call <path>_N ──────► Dialing          Requested ── RST, time-out ──► gone
//!        │                   │ called again    │ RESPONSE: "OK port" to the program
//!        │ RESPONSE owed     │                 │
//!        └───────────────────┴───► Open ◄──────┘
//!                                   │
//!   guest to program                │            program to guest
//!   RW ─► socket, rest to outbox    │            socket ─► RW, as credit allows
//!   SHUTDOWN(send) ─► outbox        │            end of file ─► SHUTDOWN(send)
//!     flushed, then SHUT_WR         │            program gone ─► SHUTDOWN(both)
//!                                   │            SHUTDOWN(receive) ─► SHUT_RD
//!                                   ▼
//!   RST, or SHUTDOWN(both) answered with RST: gone; what the outbox
//!   still holds is delivered by the muxer.
//! ```
//!
//! After the device's SHUTDOWN(both) the connection waits for the guest's RST: a RST from the
//! device would make Linux drop what its program has not read yet.

use super::BUFFER;
use super::credit::{ReceiveCredit, SendCredit};
use super::outbox::Outbox;
use super::packet::{
    Buffers, HEADER_LEN, Header, MAX_PAYLOAD, Op, Received, SHUTDOWN_RECEIVE, SHUTDOWN_SEND,
};
use rustix::net::{SendFlags, send};
use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use vmm_sys_util::epoll::EventSet;

const SHUTDOWN_BOTH: u32 = SHUTDOWN_RECEIVE | SHUTDOWN_SEND;

/// The ports of a connection; the context ids are always the host's and the guest's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key {
    /// The port on the host.
    pub host_port: u32,
    /// The port in the guest.
    pub guest_port: u32,
}

impl Key {
    /// The poll token of these ports.
    pub fn token(self) -> u64 {
        u64::from(self.host_port) << 32 | u64::from(self.guest_port)
    }

    /// The ports of a poll token.
    pub fn from_token(token: u64) -> Key {
        Key {
            host_port: (token >> 32) as u32,
            guest_port: token as u32,
        }
    }
}

/// The phase of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The guest has requested it; the program's queue was full, and is tried again.
    Dialing {
        /// Attempts left before the guest is refused.
        calls_left: u16,
    },
    /// A program has requested it; the guest has not answered.
    Requested,
    /// Both sides have agreed.
    Open,
}

/// What happens to a connection after a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It stays open.
    Keep,
    /// It ends; the guest knows already.
    Close,
    /// It ends with a RST to the guest.
    Reset,
}

/// A packet for the guest; its payload is in the buffers already.
#[derive(Debug, PartialEq, Eq)]
pub struct Outgoing {
    /// Its operation.
    pub op: Op,
    /// Flags of a SHUTDOWN.
    pub flags: u32,
    /// Bytes of payload.
    pub len: u32,
    /// The connection's `fwd_cnt`.
    pub fwd_cnt: u32,
}

/// Packets without data that are to be sent.
#[derive(Default)]
struct Owed {
    request: bool,
    response: bool,
    credit_update: bool,
    credit_request: bool,
}

/// One connection.
pub struct Connection {
    phase: Phase,
    /// The host program's socket; `None` while dialing and after the program is gone.
    stream: Option<UnixStream>,
    owed: Owed,
    /// Whether it is in the muxer's queue of connections with a packet for the guest.
    pub queued: bool,
    /// The guest may have seen the REQUEST, so it must get a RST.
    known_to_guest: bool,

    // From the guest to the host program.
    outbox: Outbox,
    inbound: ReceiveCredit,
    guest_sent_all: bool,
    write_side_shut: bool,
    host_reads_no_more: bool,

    // From the host program to the guest.
    outbound: SendCredit,
    asked_for_credit: bool,
    /// The socket was readable at the last check, or was not checked yet.
    readable: bool,
    host_sent_all: bool,
    guest_reads_no_more: bool,
    /// Flags of the SHUTDOWN packets that were sent.
    sent_shutdown: u32,
}

impl Connection {
    fn new(phase: Phase, stream: Option<UnixStream>) -> Connection {
        Connection {
            phase,
            stream,
            owed: Owed::default(),
            queued: false,
            known_to_guest: false,
            outbox: Outbox::default(),
            inbound: ReceiveCredit::default(),
            guest_sent_all: false,
            write_side_shut: false,
            host_reads_no_more: false,
            outbound: SendCredit::default(),
            asked_for_credit: false,
            readable: false,
            host_sent_all: false,
            guest_reads_no_more: false,
            sent_shutdown: 0,
        }
    }

    /// A connection of a host program, to be requested from the guest.
    pub fn from_host(stream: UnixStream) -> Connection {
        let mut connection = Connection::new(Phase::Requested, Some(stream));
        connection.owed.request = true;
        connection
    }

    /// A connection of the guest to a program that can't be reached yet.
    pub fn dialing(request: &Header, calls_left: u16) -> Connection {
        let mut connection = Connection::new(Phase::Dialing { calls_left }, None);
        connection.known_to_guest = true;
        connection
            .outbound
            .update(request.buf_alloc, request.fwd_cnt);
        connection
    }

    /// A connection of the guest to a program that has accepted.
    pub fn from_guest(request: &Header, stream: UnixStream) -> Connection {
        let mut connection = Connection::dialing(request, 0);
        connection.dialed(stream);
        connection
    }

    /// The program was reached: the guest gets its RESPONSE.
    pub fn dialed(&mut self, stream: UnixStream) {
        self.stream = Some(stream);
        self.phase = Phase::Open;
        self.readable = true;
        self.owed.response = true;
    }

    /// Its phase.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Counts an attempt; returns whether another one is left.
    pub fn count_call(&mut self) -> bool {
        match &mut self.phase {
            Phase::Dialing { calls_left } if *calls_left > 0 => {
                *calls_left -= 1;
                true
            }
            _ => false,
        }
    }

    /// Whether the guest may know it.
    pub fn is_known_to_guest(&self) -> bool {
        self.known_to_guest
    }

    /// Whether the guest was told that its program is gone. Linux then frees the port before its
    /// own program has closed the socket.
    pub fn is_over(&self) -> bool {
        self.sent_shutdown == SHUTDOWN_BOTH
    }

    /// Bytes that are held for the host program.
    #[cfg(any(test, feature = "testing"))]
    pub fn held_bytes(&self) -> usize {
        self.outbox.len()
    }

    /// Consumes the connection: returns the socket and the bytes that its program must still get.
    pub fn into_rest(self) -> Option<(UnixStream, Outbox)> {
        match self.stream {
            Some(stream) if !self.outbox.is_empty() => Some((stream, self.outbox)),
            _ => None,
        }
    }

    /// Handles a packet of the guest; a payload is in `buffers` after the header.
    pub fn handle(&mut self, op: Op, header: &Header, buffers: &Buffers<'_>, port: u32) -> Verdict {
        self.outbound.update(header.buf_alloc, header.fwd_cnt);
        if self.outbound.available() > 0 {
            self.asked_for_credit = false;
        }
        match (op, self.phase) {
            (Op::Rst, _) => Verdict::Close,
            (Op::Response, Phase::Requested) if self.known_to_guest => {
                self.accepted(port);
                Verdict::Keep
            }
            (Op::Shutdown, Phase::Open) => self.shut_down(header.flags),
            (Op::Rw, Phase::Open) => self.take(buffers, header.len as usize),
            (Op::CreditUpdate, Phase::Open) => Verdict::Keep,
            (Op::CreditRequest, Phase::Open) => {
                self.owed.credit_update = true;
                Verdict::Keep
            }
            // A second REQUEST for the same ports; any other packet before the connection is open;
            // an unexpected RESPONSE.
            _ => Verdict::Reset,
        }
    }

    /// The guest accepted: the program gets the line with the host port.
    fn accepted(&mut self, port: u32) {
        self.phase = Phase::Open;
        self.readable = true;
        let line = format!("OK {port}\n");
        let Some(stream) = &self.stream else {
            return;
        };
        // Nothing was written to this socket before, so it has space. A program that does not read
        // any more may still have sent bytes.
        let sent = send(stream, line.as_bytes(), SendFlags::NOSIGNAL);
        if sent != Ok(line.len()) {
            self.host_stopped_reading();
        }
    }

    fn shut_down(&mut self, flags: u32) -> Verdict {
        self.guest_sent_all |= flags & SHUTDOWN_SEND != 0;
        self.guest_reads_no_more |= flags & SHUTDOWN_RECEIVE != 0;
        if self.guest_sent_all && self.guest_reads_no_more {
            return Verdict::Reset;
        }
        if self.guest_reads_no_more
            && let Some(stream) = &self.stream
        {
            // Fails only if the program is gone, which an event reports.
            let _ = stream.shutdown(Shutdown::Read);
            self.host_sent_all = true;
            self.close_if_done();
        }
        self.shut_write_side();
        Verdict::Keep
    }

    /// Sends received bytes to the host program, or keeps them in the outbox.
    fn take(&mut self, buffers: &Buffers<'_>, length: usize) -> Verdict {
        if self.guest_sent_all || self.outbox.len() + length > BUFFER as usize {
            return Verdict::Reset;
        }
        let stream = match &self.stream {
            Some(stream) if !self.host_reads_no_more => stream,
            _ => {
                self.inbound.forward(length);
                return Verdict::Keep;
            }
        };
        let sent = match self.outbox.is_empty() {
            true => buffers.send(stream, HEADER_LEN, length),
            false => Ok(0),
        };
        match sent {
            Ok(sent) => {
                self.inbound.forward(sent);
                self.outbox.push(buffers, HEADER_LEN + sent, length - sent);
            }
            Err(_) => {
                self.inbound.forward(length);
                self.host_stopped_reading();
            }
        }
        Verdict::Keep
    }

    /// Handles events of the socket.
    pub fn on_socket(&mut self, events: EventSet) {
        let ended = events.intersects(EventSet::HANG_UP | EventSet::ERROR);
        if ended || events.intersects(EventSet::IN | EventSet::READ_HANG_UP) {
            self.readable = true;
        }
        if events.contains(EventSet::HANG_UP) {
            self.host_stopped_reading();
        } else if events.intersects(EventSet::OUT | EventSet::ERROR) {
            self.flush();
        }
    }

    /// Sends to the program what fits; true if bytes are left.
    pub fn flush(&mut self) -> bool {
        let Some(stream) = &self.stream else {
            return false;
        };
        if !self.outbox.is_empty() {
            let before = self.outbox.len();
            let flushed = self.outbox.flush(stream);
            self.inbound.forward(before - self.outbox.len());
            if flushed.is_err() {
                self.host_stopped_reading();
            }
        }
        self.shut_write_side();
        !self.outbox.is_empty()
    }

    /// Passes on the guest's end of file, once all bytes before it were sent.
    fn shut_write_side(&mut self) {
        if self.guest_sent_all
            && self.outbox.is_empty()
            && !self.write_side_shut
            && let Some(stream) = &self.stream
        {
            let _ = stream.shutdown(Shutdown::Write);
            self.write_side_shut = true;
        }
    }

    fn host_stopped_reading(&mut self) {
        self.host_reads_no_more = true;
        let lost = self.outbox.discard();
        self.inbound.forward(lost);
        self.close_if_done();
    }

    /// Closes a socket that is not needed any more.
    fn close_if_done(&mut self) {
        if self.host_reads_no_more && self.host_sent_all {
            self.stream = None;
        }
    }

    /// Shutdown flags that the guest was not told yet.
    fn unsent_shutdown(&self) -> u32 {
        let mut flags = 0;
        if self.host_sent_all {
            flags |= SHUTDOWN_SEND;
        }
        if self.host_reads_no_more {
            flags |= SHUTDOWN_RECEIVE;
        }
        match self.phase {
            Phase::Open if flags & !self.sent_shutdown != 0 => flags,
            _ => 0,
        }
    }

    fn may_read(&self) -> bool {
        self.phase == Phase::Open && self.readable && !self.host_sent_all && self.stream.is_some()
    }

    /// Whether there is, or may be, a packet for the guest.
    pub fn has_packet(&self) -> bool {
        let owed = &self.owed;
        owed.request
            || owed.response
            || owed.credit_update
            || owed.credit_request
            || self.inbound.is_update_due()
            || self.unsent_shutdown() != 0
            || (self.may_read() && (self.outbound.available() > 0 || !self.asked_for_credit))
    }

    /// Makes the next packet for the guest, if there is one. Its payload is read from the socket
    /// directly to `buffers`, after the header.
    pub fn next_packet(&mut self, buffers: &Buffers<'_>) -> Option<Outgoing> {
        let (op, flags, len) = self.choose_op(buffers)?;
        self.known_to_guest = true;
        self.owed.credit_update = false;
        Some(Outgoing {
            op,
            flags,
            len,
            fwd_cnt: self.inbound.announce(),
        })
    }

    fn choose_op(&mut self, buffers: &Buffers<'_>) -> Option<(Op, u32, u32)> {
        if std::mem::take(&mut self.owed.request) {
            return Some((Op::Request, 0, 0));
        }
        if std::mem::take(&mut self.owed.response) {
            return Some((Op::Response, 0, 0));
        }
        if self.may_read() {
            match self.outbound.available().min(MAX_PAYLOAD) {
                0 if !self.asked_for_credit => {
                    self.asked_for_credit = true;
                    self.owed.credit_request = true;
                }
                0 => {}
                credit => {
                    let length = self.read(buffers, credit as usize);
                    if length > 0 {
                        return Some((Op::Rw, 0, length as u32));
                    }
                }
            }
        }
        let flags = self.unsent_shutdown();
        if flags != 0 {
            self.sent_shutdown = flags;
            if flags == SHUTDOWN_BOTH {
                self.owed.credit_request = false;
            }
            return Some((Op::Shutdown, flags, 0));
        }
        if self.owed.credit_update || self.inbound.is_update_due() {
            return Some((Op::CreditUpdate, 0, 0));
        }
        std::mem::take(&mut self.owed.credit_request).then_some((Op::CreditRequest, 0, 0))
    }

    /// Reads from the host program into `buffers`; returns the number of bytes.
    fn read(&mut self, buffers: &Buffers<'_>, credit: usize) -> usize {
        let Some(stream) = &mut self.stream else {
            return 0;
        };
        let room = buffers.len() - HEADER_LEN;
        match buffers.receive(stream, HEADER_LEN, room.min(credit)) {
            Ok(Received::Bytes(count)) => {
                self.outbound.spend(count);
                return count;
            }
            Ok(Received::Empty) => self.readable = false,
            Ok(Received::End) => self.host_sent_all = true,
            Err(error) => {
                if error.kind() != io::ErrorKind::ConnectionReset {
                    tracing::debug!(%error, "reading a host socket failed");
                }
                self.host_sent_all = true;
                self.host_stopped_reading();
            }
        }
        self.close_if_done();
        0
    }
}
