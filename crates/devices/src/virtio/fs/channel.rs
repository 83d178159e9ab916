//! The socket to the server: a message is a packet.

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// A non-blocking socket of type SOCK_SEQPACKET.
#[derive(Debug)]
pub(super) struct Channel {
    socket: OwnedFd,
    /// The server has closed its end.
    closed: bool,
}

/// Whether a message was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sent {
    Yes,
    /// The socket is full.
    Later,
    /// This message can't be sent; others may.
    Failed,
    /// The server is gone.
    Never,
}

/// What was received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Received {
    /// A message of this many bytes; if that is more than there was room for, the rest is lost.
    Message(usize),
    /// There is none now.
    Nothing,
    /// The server is gone.
    End,
}

impl Channel {
    pub(super) fn new(socket: OwnedFd) -> io::Result<Channel> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        let closed = false;
        Ok(Channel { socket, closed })
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    pub(super) fn send(&mut self, message: &[u8]) -> Sent {
        if self.closed {
            return Sent::Never;
        }
        loop {
            match rustix::net::send(&self.socket, message, SendFlags::NOSIGNAL) {
                Ok(_) => return Sent::Yes,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Sent::Later,
                Err(Errno::NOBUFS | Errno::NOMEM | Errno::MSGSIZE) => return Sent::Failed,
                Err(error) => {
                    self.close(error);
                    return Sent::Never;
                }
            }
        }
    }

    pub(super) fn receive(&mut self, room: &mut [u8]) -> Received {
        if self.closed {
            return Received::End;
        }
        loop {
            match rustix::net::recv(&self.socket, &mut *room, RecvFlags::TRUNC) {
                Ok((_, 0)) => {
                    self.close(Errno::NOTCONN);
                    return Received::End;
                }
                Ok((_, length)) => return Received::Message(length),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Received::Nothing,
                Err(error) => {
                    self.close(error);
                    return Received::End;
                }
            }
        }
    }

    fn close(&mut self, error: Errno) {
        tracing::warn!(%error, "the server of a shared folder has ended; its files return ENOTCONN");
        self.closed = true;
    }
}
