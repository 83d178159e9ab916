//! Messages on a connection.

use jiffy_wire::frame::{self, Decoder};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

pub fn send<T: serde::Serialize>(stream: &mut UnixStream, message: &T) -> io::Result<()> {
    stream.write_all(&frame::to_vec(message).map_err(io::Error::other)?)
}

pub struct Messages {
    stream: UnixStream,
    decoder: Decoder,
}

impl Messages {
    pub fn new(stream: UnixStream) -> Messages {
        Messages {
            stream,
            decoder: Decoder::new(),
        }
    }

    pub fn next<T: serde::de::DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        let mut buffer = [0; 16 * 1024];
        loop {
            if let Some(message) = self.decoder.next().map_err(io::Error::other)? {
                return Ok(Some(message));
            }
            match self.stream.read(&mut buffer)? {
                0 => return Ok(None),
                got => self.decoder.push(&buffer[..got]),
            }
        }
    }
}
