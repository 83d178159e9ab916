//! passt(1) on a stream socket: each frame follows its length, four bytes big endian, as in QEMU's
//! `-netdev stream`.

use super::super::frame::{Frame, Place};
use super::super::guard::{Gate, TYPE_IPV4, UDP};
use super::super::{ETHERNET, FRAME_MAX, header};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

const LENGTH: usize = 4;
/// Longest frame that passt takes.
const SENT_MAX: usize = 65_535;
/// Most datagrams in one frame: Linux sends no more (UDP_MAX_SEGMENTS).
const SEGMENTS_MAX: usize = 128;
const UDP_HEADER: usize = 8;
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
    /// Is told of the frames that come in.
    gate: Option<Arc<Gate>>,
}

impl Passt {
    /// Makes the socket non-blocking. `gate` is told of the frames that come in.
    ///
    /// # Errors
    ///
    /// If ioctl(2) of the socket fails.
    pub fn new(socket: UnixStream, gate: Option<Arc<Gate>>) -> io::Result<Passt> {
        socket.set_nonblocking(true)?;
        Ok(Passt {
            socket: Arc::new(OwnedFd::from(socket).into()),
            buffer: vec![0; BUFFER].into_boxed_slice(),
            start: 0,
            end: 0,
            unsent: Vec::new(),
            gate,
        })
    }

    pub fn file(&self) -> &Arc<File> {
        &self.socket
    }

    /// The next frame after an empty virtio header. Returns the bytes of both.
    ///
    /// # Errors
    ///
    /// `WouldBlock` if no whole frame has come. `UnexpectedEof` if passt has closed the socket.
    /// Otherwise if passt announces a frame that is too long, or read(2) fails.
    pub fn receive(&mut self, mut place: Place<'_, '_>) -> io::Result<usize> {
        let frame = loop {
            match self.frame()? {
                Some(frame) => break frame,
                None => self.fill()?,
            }
        };
        let bytes = &self.buffer[self.start + LENGTH..][..frame];
        if let Some(gate) = &self.gate {
            gate.note(bytes);
        }
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
    ///
    /// # Errors
    ///
    /// `WouldBlock` if the rest of an earlier frame, or any of this one, has to wait: then nothing
    /// of it is sent. `InvalidInput` if it is longer than passt takes. Otherwise if the socket
    /// can't be written.
    pub fn send(&mut self, mut frame: Frame<'_, '_>) -> io::Result<()> {
        self.flush()?;
        let start = frame.lead.frame();
        let bytes = start.len() + frame.rest();
        if bytes > SENT_MAX {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let head = [&(bytes as u32).to_be_bytes(), start].concat();
        let sent = frame.write_to(self.socket.as_fd(), &head)?;
        if sent < LENGTH + bytes {
            self.unsent
                .extend_from_slice(head.get(sent..).unwrap_or(&[]));
            let left = frame.copy_rest(sent.saturating_sub(head.len()));
            self.unsent.extend_from_slice(&left);
        }
        Ok(())
    }

    /// Sends a frame that holds several datagrams of `segment` bytes, and a rest, as a frame for
    /// each. The fields for checksums keep their values: passt does not read them.
    ///
    /// # Errors
    ///
    /// `WouldBlock` if the rest of an earlier frame has to wait. `InvalidInput` if the frame is no
    /// IPv4 datagram of UDP, or has too many segments. Otherwise if the socket can't be written.
    pub fn send_segments(&mut self, frame: &Frame<'_, '_>, segment: usize) -> io::Result<()> {
        self.flush()?;
        let whole = [frame.lead.frame(), &frame.copy_rest(0)].concat();
        let frames = datagrams(&whole, segment).ok_or(io::ErrorKind::InvalidInput)?;
        self.unsent = frames;
        match self.flush() {
            // The rest follows when there is space.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            sent => sent,
        }
    }

    pub fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Sends the rest of a frame.
    ///
    /// # Errors
    ///
    /// `WouldBlock` if a part has to wait. Otherwise if the socket can't be written.
    pub fn flush(&mut self) -> io::Result<()> {
        while !self.unsent.is_empty() {
            let sent = (&*self.socket).write(&self.unsent)?;
            self.unsent.drain(..sent);
        }
        Ok(())
    }
}

/// The frames of the datagrams in `frame`, each after its length; `None` if it is not IPv4 and UDP,
/// or has too many.
fn datagrams(frame: &[u8], segment: usize) -> Option<Vec<u8>> {
    let (ethernet, packet) = frame.split_at_checked(ETHERNET)?;
    let version = *packet.first()?;
    let before = usize::from(version & 0xf) * 4;
    let (headers, payload) = packet.split_at_checked(before + UDP_HEADER)?;
    let is_datagram =
        ethernet[12..] == TYPE_IPV4 && version >> 4 == 4 && before >= 20 && headers[9] == UDP;
    if !is_datagram || payload.len().div_ceil(segment) > SEGMENTS_MAX {
        return None;
    }
    let mut frames = Vec::with_capacity(2 * frame.len());
    for part in payload.chunks(segment) {
        let datagram = u16::try_from(UDP_HEADER + part.len()).ok()?;
        let bytes = (before as u16).checked_add(datagram)?;
        let mut own = headers.to_vec();
        own[2..4].copy_from_slice(&bytes.to_be_bytes());
        own[before + 4..before + 6].copy_from_slice(&datagram.to_be_bytes());
        frames.extend_from_slice(&((ETHERNET + usize::from(bytes)) as u32).to_be_bytes());
        frames.extend_from_slice(ethernet);
        frames.extend_from_slice(&own);
        frames.extend_from_slice(part);
    }
    Some(frames)
}
