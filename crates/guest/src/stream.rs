//! A connected socket that carries frames and never blocks.

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::mem::MaybeUninit;
use jiffy_wire::frame::{self, Decoder, FrameError};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use serde::{Serialize, de::DeserializeOwned};

/// With more queued bytes than this, no further output is queued for the connection.
pub const SEND_LIMIT: usize = 128 * 1024;

/// A connection with its receive and send buffers.
#[derive(Debug)]
pub struct FrameStream {
    socket: OwnedFd,
    decoder: Decoder,
    unsent: VecDeque<u8>,
}

/// Result of a read from the peer.
#[derive(Debug, PartialEq, Eq)]
pub enum Received {
    /// Data; messages may be complete now.
    Data,
    /// No data now.
    Nothing,
    /// The peer has closed its side. The protocol has no half-closed connections.
    Closed,
}

impl FrameStream {
    /// A connection over this socket.
    pub fn new(socket: OwnedFd) -> FrameStream {
        FrameStream {
            socket,
            decoder: Decoder::new(),
            unsent: VecDeque::new(),
        }
    }

    /// Queues a message. A message too large for a frame is a bug, and is dropped.
    pub fn send<T: Serialize>(&mut self, message: &T) {
        let mut bytes = Vec::new();
        if frame::encode(message, &mut bytes).is_ok() {
            self.unsent.extend(bytes);
        }
    }

    /// Bytes that are queued and not yet accepted by the kernel.
    pub fn unsent(&self) -> usize {
        self.unsent.len()
    }

    /// Whether there is room for more messages.
    pub fn has_room(&self) -> bool {
        self.unsent.len() < SEND_LIMIT
    }

    /// Passes as many queued bytes to the kernel as it accepts.
    ///
    /// # Errors
    ///
    /// If the peer is gone or `send` fails; not if the kernel accepts no more now.
    pub fn flush(&mut self) -> Result<(), Errno> {
        while !self.unsent.is_empty() {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match send(&self.socket, self.unsent.as_slices().0, flags) {
                Ok(count) => drop(self.unsent.drain(..count)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        if self.unsent.capacity() > SEND_LIMIT {
            self.unsent = VecDeque::new();
        }
        Ok(())
    }

    /// Reads once.
    pub fn receive(&mut self, space: &mut [MaybeUninit<u8>]) -> Received {
        match recv(&self.socket, space, RecvFlags::DONTWAIT) {
            Ok(((bytes, _), _)) if !bytes.is_empty() => {
                self.decoder.push(bytes);
                Received::Data
            }
            Err(Errno::AGAIN | Errno::INTR) => Received::Nothing,
            _ => Received::Closed,
        }
    }

    /// The next complete message.
    ///
    /// # Errors
    ///
    /// If what was received is no message of this type, or is too long.
    #[allow(clippy::should_implement_trait)] // the type is chosen at each call
    pub fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, FrameError> {
        self.decoder.next()
    }

    /// The socket, and bytes that were read but not decoded.
    pub fn into_parts(self) -> (OwnedFd, Vec<u8>) {
        (self.socket, self.decoder.into_rest())
    }
}

impl AsFd for FrameStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
