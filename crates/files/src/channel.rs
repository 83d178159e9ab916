//! The socket on which requests come: of packets, or a stream of messages that begin with their
//! length.

use crate::protocol::HEADER;
use jiffy_sys::mutex::lock;
use jiffy_wire::files::MESSAGE_MAX;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketType, recv, send, sockopt};
use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::time::Duration;

/// Bytes of answers that the socket may hold: a few of the longest. The kernel grants less.
const SEND_BUFFER: usize = 4 * MESSAGE_MAX;
/// How long to wait if the kernel has no memory for an answer.
const NO_MEMORY: Duration = Duration::from_millis(10);
/// Bytes of a message's length, with which it begins.
const LENGTH: usize = 4;

/// A socket for several threads, each of which receives and sends whole messages.
#[derive(Debug)]
pub struct Channel {
    socket: OwnedFd,
    /// For a stream.
    turns: Option<Turns>,
}

/// Locked by the thread that receives or sends a message of a stream.
#[derive(Debug, Default)]
struct Turns {
    receiving: Mutex<()>,
    sending: Mutex<()>,
}

impl Channel {
    /// `None` unless it is a socket of `AF_UNIX` and `SOCK_SEQPACKET` or `SOCK_STREAM`.
    pub fn of(socket: OwnedFd) -> Option<Channel> {
        if sockopt::socket_domain(&socket) != Ok(AddressFamily::UNIX) {
            return None;
        }
        let turns = match sockopt::socket_type(&socket) {
            Ok(SocketType::SEQPACKET) => None,
            Ok(SocketType::STREAM) => Some(Turns::default()),
            _ => return None,
        };
        let _ = sockopt::set_socket_send_buffer_size(&socket, SEND_BUFFER);
        Some(Channel { socket, turns })
    }

    /// Receives one message. Returns how many of its bytes are in `message`, and its length; `None`
    /// if the other side has closed the socket, or a stream has a message of an impossible length.
    pub fn receive(&self, message: &mut [u8; MESSAGE_MAX]) -> Option<(usize, usize)> {
        let Some(turns) = &self.turns else {
            return self.receive_packet(message);
        };
        let _turn = lock(&turns.receiving);
        self.fill(&mut message[..LENGTH])?;
        let length = length_of(message)?;
        self.fill(&mut message[LENGTH..length])?;
        Some((length, length))
    }

    fn receive_packet(&self, message: &mut [u8; MESSAGE_MAX]) -> Option<(usize, usize)> {
        loop {
            match recv(&self.socket, &mut message[..], RecvFlags::TRUNC) {
                // An empty message, or the end.
                Ok((_, 0)) if self.is_closed() => return None,
                Ok(lengths) => return Some(lengths),
                Err(Errno::INTR) => {}
                Err(_) => return None,
            }
        }
    }

    /// Reads until all of `bytes` is there; `None` if that does not happen.
    fn fill(&self, mut bytes: &mut [u8]) -> Option<()> {
        while !bytes.is_empty() {
            match recv(&self.socket, &mut *bytes, RecvFlags::WAITALL) {
                Ok((_, 0)) => return None,
                Ok((read, _)) => bytes = &mut bytes[read..],
                Err(Errno::INTR) => {}
                Err(_) => return None,
            }
        }
        Some(())
    }

    /// Sends one message. False if nobody can receive it.
    pub fn send(&self, mut answer: &[u8]) -> bool {
        let _turn = self.turns.as_ref().map(|turns| lock(&turns.sending));
        loop {
            match send(&self.socket, answer, SendFlags::NOSIGNAL) {
                // A stream may take a part.
                Ok(sent) if sent < answer.len() => answer = &answer[sent..],
                Ok(_) => return true,
                Err(Errno::INTR) => {}
                Err(Errno::NOBUFS | Errno::NOMEM) => std::thread::sleep(NO_MEMORY),
                Err(_) => return false,
            }
        }
    }

    fn is_closed(&self) -> bool {
        let mut wanted = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        let now = rustix::event::Timespec::default();
        match poll(&mut wanted, Some(&now)) {
            Ok(_) => wanted[0]
                .revents()
                .intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL),
            Err(error) => error != Errno::INTR,
        }
    }
}

/// The length at the beginning of a message of a stream. After an impossible length, the beginning
/// of the next message is not known.
fn length_of(message: &[u8; MESSAGE_MAX]) -> Option<usize> {
    let length = u32::from_ne_bytes(*message.first_chunk()?) as usize;
    if (HEADER..=MESSAGE_MAX).contains(&length) {
        return Some(length);
    }
    tracing::warn!(
        length,
        "a message of the stream has an impossible length: the end"
    );
    None
}
