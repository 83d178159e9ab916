//! Bytes from the guest that a host program has not read yet.

use super::packet::Buffers;
use rustix::io::Errno;
use rustix::net::{SendFlags, send};
use std::collections::VecDeque;
use std::io;
use std::os::unix::net::UnixStream;

/// Bytes that did not fit into a host socket, in order. Has memory only while it holds some.
#[derive(Default)]
pub struct Outbox {
    bytes: VecDeque<u8>,
}

impl Outbox {
    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Appends `length` bytes of guest memory; the caller has checked the credit.
    pub fn push(&mut self, buffers: &Buffers<'_>, offset: usize, length: usize) {
        let mut chunk = [0; 4096];
        let mut done = 0;
        while done < length {
            let count = (length - done).min(chunk.len());
            buffers.copy_to(offset + done, &mut chunk[..count]);
            self.bytes.extend(&chunk[..count]);
            done += count;
        }
    }

    /// Sends as much as the socket takes.
    ///
    /// # Errors
    ///
    /// If send(2) fails, such as with `EPIPE` if the program is gone. The rest is still held.
    pub fn flush(&mut self, stream: &UnixStream) -> io::Result<()> {
        while !self.bytes.is_empty() {
            match send(stream, self.bytes.as_slices().0, SendFlags::NOSIGNAL) {
                Ok(count) => {
                    self.bytes.drain(..count);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(()),
                Err(errno) => return Err(errno.into()),
            }
        }
        self.bytes = VecDeque::new();
        Ok(())
    }

    /// Discards all bytes; returns how many.
    pub fn discard(&mut self) -> usize {
        std::mem::take(&mut self.bytes).len()
    }
}
