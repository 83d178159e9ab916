//! passt(1) on a stream socket: each frame follows its length, four bytes big endian, as in QEMU's
//! `-netdev stream`.

use super::super::frame::{Frame, Place};
use super::super::{FRAME_MAX, header};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

const LENGTH: usize = 4;
/// Bytes of the buffer: more than a frame, because one read returns several small ones.
const BUFFER: usize = 2 * (LENGTH + FRAME_MAX);

/// A connection to passt.
#[derive(Debug)]
pub struct Passt {
    socket: Arc<File>,
    /// Bytes that were read and not delivered yet: `buffer[start..end]`.
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    /// The rest of a frame that was begun to be sent.
    unsent: Vec<u8>,
}

impl Passt {
    pub fn new(socket: UnixStream) -> io::Result<Passt> {
        socket.set_nonblocking(true)?;
        Ok(Passt {
            socket: Arc::new(OwnedFd::from(socket).into()),
            buffer: vec![0; BUFFER].into_boxed_slice(),
            start: 0,
            end: 0,
            unsent: Vec::new(),
        })
    }

    pub fn file(&self) -> &Arc<File> {
        &self.socket
    }

    /// The next frame after an empty virtio header.
    pub fn receive(&mut self, mut place: Place<'_>) -> io::Result<usize> {
        let frame = loop {
            match self.frame()? {
                Some(frame) => break frame,
                None => self.fill()?,
            }
        };
        let bytes = &self.buffer[self.start + LENGTH..][..frame];
        place.store(0, &[0; header::BYTES]);
        place.store(header::BYTES, bytes);
        self.start += LENGTH + frame;
        Ok(header::BYTES + frame)
    }

    /// The length of the frame in the buffer, if it is complete.
    fn frame(&self) -> io::Result<Option<usize>> {
        let there = &self.buffer[self.start..self.end];
        let Some((length, rest)) = there.split_first_chunk::<LENGTH>() else {
            return Ok(None);
        };
        let length = u32::from_be_bytes(*length) as usize;
        if length > FRAME_MAX {
            return Err(io::Error::other(format!(
                "passt announced a frame of {length} bytes"
            )));
        }
        Ok((rest.len() >= length).then_some(length))
    }

    fn fill(&mut self) -> io::Result<()> {
        self.buffer.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        match (&*self.socket).read(&mut self.buffer[self.end..])? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            count => {
                self.end += count;
                Ok(())
            }
        }
    }

    /// Sends a frame without its virtio header. Once a part of it is sent, the rest is kept and sent
    /// later.
    pub fn send(&mut self, mut frame: Frame<'_>) -> io::Result<()> {
        self.flush()?;
        let ethernet = &frame.lead[header::BYTES..];
        let length = (ethernet.len() + frame.rest()) as u32;
        let head = [&length.to_be_bytes(), ethernet].concat();
        let sent = frame.write_to(self.socket.as_fd(), &head)?;
        if sent < head.len() + frame.rest() {
            self.unsent
                .extend_from_slice(head.get(sent..).unwrap_or(&[]));
            let left = frame.copy_rest(sent.saturating_sub(head.len()));
            self.unsent.extend_from_slice(&left);
        }
        Ok(())
    }

    /// Sends the rest of a frame.
    pub fn flush(&mut self) -> io::Result<()> {
        while !self.unsent.is_empty() {
            let sent = (&*self.socket).write(&self.unsent)?;
            self.unsent.drain(..sent);
        }
        Ok(())
    }
}
