//! Bodies of requests.

use crate::failure::{Failure, Result};
use hyper::body::{Body, Bytes, Frame, SizeHint};
use serde::Serialize;
use std::io::{self, Write};
use std::pin::Pin;
use std::task::{Context, Poll};
use thiserror::Error;
use tokio::sync::mpsc;

/// The body of a request.
pub enum RequestBody {
    /// The whole body; `None` once it was sent, or if there is none.
    Whole(Option<Bytes>),
    /// Pieces from a channel; an error ends the request.
    Stream(mpsc::Receiver<io::Result<Bytes>>),
}

/// The source of an upload could not be read.
#[derive(Debug, Error)]
#[error("{0}")]
pub struct Unreadable(String);

impl RequestBody {
    /// An empty body.
    pub fn empty() -> RequestBody {
        RequestBody::Whole(None)
    }

    /// A JSON document.
    ///
    /// # Errors
    ///
    /// If the value can't be written as JSON.
    pub fn json<T: Serialize>(value: &T) -> Result<RequestBody> {
        let bytes = serde_json::to_vec(value)
            .map_err(|error| Failure::new(format!("the request can't be written: {error}")))?;
        Ok(RequestBody::Whole(Some(bytes.into())))
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = Unreadable;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<std::result::Result<Frame<Bytes>, Unreadable>>> {
        match self.get_mut() {
            RequestBody::Whole(bytes) => Poll::Ready(bytes.take().map(|b| Ok(Frame::data(b)))),
            RequestBody::Stream(pieces) => pieces.poll_recv(context).map(|piece| {
                piece.map(|piece| {
                    piece
                        .map(Frame::data)
                        .map_err(|error| Unreadable(error.to_string()))
                })
            }),
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, RequestBody::Whole(None))
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            RequestBody::Whole(bytes) => {
                SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64))
            }
            RequestBody::Stream(_) => SizeHint::default(),
        }
    }
}

/// The writing end of a streamed body, for a thread of its own.
pub struct BodySender {
    pieces: mpsc::Sender<io::Result<Bytes>>,
    buffer: Vec<u8>,
}

/// Bytes per piece of a streamed body.
const PIECE: usize = 256 * 1024;

impl BodySender {
    /// Returns a sender, and the receiver for [`super::Client::upload`].
    pub fn new() -> (BodySender, mpsc::Receiver<io::Result<Bytes>>) {
        let (pieces, receiver) = mpsc::channel(4);
        let sender = BodySender {
            pieces,
            buffer: Vec::new(),
        };
        (sender, receiver)
    }

    /// Sends the rest; with an error, aborts the request instead.
    pub fn finish(mut self, result: io::Result<()>) {
        let last = result.and_then(|()| self.flush());
        if let Err(error) = last {
            // The receiver has ended and reports its own error.
            let _ = self.pieces.blocking_send(Err(error));
        }
    }
}

impl Write for BodySender {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.buffer.extend_from_slice(bytes);
        if self.buffer.len() >= PIECE {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let piece = Bytes::from(std::mem::take(&mut self.buffer));
        self.pieces
            .blocking_send(Ok(piece))
            .map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}
