//! The body of a request to a VM.

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use std::pin::Pin;
use std::task::{Context, Poll};

/// A client's body as it comes, or none, which can be sent again.
#[derive(Debug)]
pub(crate) enum Outgoing {
    None,
    Streamed(Incoming),
}

impl From<Incoming> for Outgoing {
    fn from(body: Incoming) -> Outgoing {
        match body.is_end_stream() {
            true => Outgoing::None,
            false => Outgoing::Streamed(body),
        }
    }
}

impl Body for Outgoing {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        match self.get_mut() {
            Outgoing::None => Poll::Ready(None),
            Outgoing::Streamed(body) => Pin::new(body).poll_frame(context),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Outgoing::None => true,
            Outgoing::Streamed(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Outgoing::None => SizeHint::with_exact(0),
            Outgoing::Streamed(body) => body.size_hint(),
        }
    }
}
