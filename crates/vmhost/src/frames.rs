//! Messages in frames, on an asynchronous stream.

use jiffy_wire::frame::{self, Decoder, FrameError};
use serde::{Serialize, de::DeserializeOwned};
use std::io;
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Bytes requested with each read.
const READ: usize = 16 * 1024;

/// Why no message could be read.
#[derive(Debug, Error)]
pub enum ReadError {
    /// The stream failed.
    #[error("reading failed")]
    Io(#[from] io::Error),
    /// The bytes are not a valid message.
    #[error("the received bytes are not a valid message")]
    Frame(#[from] FrameError),
}

/// Cuts a stream into messages. Cancelling [`FrameReader::next`] loses nothing.
#[derive(Debug)]
pub struct FrameReader<R> {
    stream: R,
    decoder: Decoder,
    buffer: Vec<u8>,
}

impl<R: AsyncRead + Unpin> FrameReader<R> {
    /// Reads from this stream.
    pub fn new(stream: R) -> FrameReader<R> {
        FrameReader {
            stream,
            decoder: Decoder::new(),
            buffer: Vec::new(),
        }
    }

    /// The next message; `None` at the end of the stream, even if the last message is incomplete.
    ///
    /// # Errors
    ///
    /// If the stream can't be read, or the bytes are not a valid message.
    pub async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, ReadError> {
        loop {
            if let Some(message) = self.decoder.next()? {
                return Ok(Some(message));
            }
            self.buffer.resize(READ, 0);
            match self.stream.read(&mut self.buffer).await? {
                0 => return Ok(None),
                got => self.decoder.push(&self.buffer[..got]),
            }
        }
    }

    /// Returns the stream; drops buffered bytes.
    pub fn into_inner(self) -> R {
        self.stream
    }
}

/// Writes one message as a frame.
///
/// # Errors
///
/// `InvalidData` if the message is too large for a frame; otherwise that of the stream.
pub async fn write<T: Serialize>(
    stream: &mut (impl AsyncWrite + Unpin),
    message: &T,
) -> io::Result<()> {
    let bytes = frame::to_vec(message)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    stream.write_all(&bytes).await
}
