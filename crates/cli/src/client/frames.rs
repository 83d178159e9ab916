//! A connection that carries frames in both directions.

use crate::failure::{Failure, Kind, Result, reason};
use hyper::body::{Body, Incoming};
use jiffy_wire::frame::{Decoder, FrameError, to_vec};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::future::poll_fn;
use std::pin::Pin;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Frames in both directions.
pub struct Frames {
    /// Receives from the node.
    pub reader: FrameReader,
    /// Sends to the node.
    pub writer: FrameWriter,
}

impl Frames {
    /// Takes over a connection.
    pub fn new(stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) -> Frames {
        let (read, write) = tokio::io::split(stream);
        Frames {
            reader: FrameReader {
                source: Source::Stream(Box::new(read)),
                decoder: Decoder::new(),
                buffer: vec![0; 16 * 1024],
            },
            writer: FrameWriter {
                stream: Box::new(write),
            },
        }
    }
}

/// The source of frames.
enum Source {
    Stream(Box<dyn AsyncRead + Send + Unpin>),
    Body(Incoming),
}

/// Frames from the node.
pub struct FrameReader {
    source: Source,
    decoder: Decoder,
    buffer: Vec<u8>,
}

impl FrameReader {
    /// Reads frames from the body of an ordinary answer.
    pub fn of_body(body: Incoming) -> FrameReader {
        FrameReader {
            source: Source::Body(body),
            decoder: Decoder::new(),
            buffer: Vec::new(),
        }
    }

    /// The next message; `None` if the stream ends between two frames. Cancel safe.
    ///
    /// # Errors
    ///
    /// If the connection is lost, the stream ends in a message, or a message is malformed.
    pub async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>> {
        loop {
            if let Some(message) = self.decoder.next().map_err(refused)? {
                return Ok(Some(message));
            }
            if !self.fill().await? {
                return match self.decoder.pending() {
                    0 => Ok(None),
                    _ => Err(broken("it ended in the middle of a message")),
                };
            }
        }
    }

    /// Reads more bytes; false at the end.
    async fn fill(&mut self) -> Result<bool> {
        match &mut self.source {
            Source::Stream(stream) => {
                let count = stream
                    .read(&mut self.buffer)
                    .await
                    .map_err(|error| broken(&reason(&error)))?;
                self.decoder.push(&self.buffer[..count]);
                Ok(count > 0)
            }
            Source::Body(body) => loop {
                match poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await {
                    None => return Ok(false),
                    Some(Err(_)) => return Err(broken("the answer was cut off")),
                    Some(Ok(frame)) => {
                        if let Ok(bytes) = frame.into_data() {
                            self.decoder.push(&bytes);
                            return Ok(true);
                        }
                    }
                }
            },
        }
    }
}

/// Frames to the node.
pub struct FrameWriter {
    stream: Box<dyn AsyncWrite + Send + Unpin>,
}

impl FrameWriter {
    /// Sends one message.
    ///
    /// # Errors
    ///
    /// If the message is too large, or the connection is lost.
    pub async fn send<T: Serialize>(&mut self, message: &T) -> Result<()> {
        let bytes = to_vec(message).map_err(refused)?;
        self.stream
            .write_all(&bytes)
            .await
            .map_err(|error| broken(&reason(&error)))
    }

    /// Sends some of these bytes of encoded frames and returns how many. Cancel safe: if it is
    /// dropped, nothing was sent.
    ///
    /// # Errors
    ///
    /// If `write` fails.
    pub async fn send_some(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.stream.write(bytes).await
    }
}

fn refused(error: FrameError) -> Failure {
    Failure::new(format!(
        "jiffyd sent a message that this jiffy does not understand: {error}"
    ))
    .hint("`jiffy version` shows whether jiffy and jiffyd are of different versions")
}

fn broken(why: &str) -> Failure {
    Failure::new(format!("the connection to jiffyd was lost: {why}")).kind(Kind::Unreachable)
}
