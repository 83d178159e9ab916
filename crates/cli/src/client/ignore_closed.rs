//! A connection on which a failed write does not hide the answer.

use std::io::{self, ErrorKind, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A stream whose writes ignore that the other end has closed it.
///
/// A node that refuses an upload answers and closes the connection before it has read all of it. A
/// failed write must not hide that answer: bytes that can't be sent are dropped, and the next read
/// returns the answer.
pub struct IgnoreClosed<S> {
    stream: S,
    closed: bool,
}

impl<S> IgnoreClosed<S> {
    /// Wraps a fresh connection.
    pub fn new(stream: S) -> IgnoreClosed<S> {
        IgnoreClosed {
            stream,
            closed: false,
        }
    }

    /// The result of a write of `length` bytes.
    fn outcome(&mut self, result: io::Result<usize>, length: usize) -> io::Result<usize> {
        match result {
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::BrokenPipe | ErrorKind::ConnectionReset
                ) =>
            {
                self.closed = true;
                Ok(length)
            }
            result => result,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for IgnoreClosed<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for IgnoreClosed<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.closed {
            return Poll::Ready(Ok(bytes.len()));
        }
        Pin::new(&mut this.stream)
            .poll_write(context, bytes)
            .map(|result| this.outcome(result, bytes.len()))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let length = pieces.iter().map(|piece| piece.len()).sum();
        if this.closed {
            return Poll::Ready(Ok(length));
        }
        Pin::new(&mut this.stream)
            .poll_write_vectored(context, pieces)
            .map(|result| this.outcome(result, length))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}
