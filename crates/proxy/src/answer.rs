//! The body of a VM's answer, on its way to the client.

use crate::servers::Answering;
use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

/// Keeps the VM in use until the client has all of it.
pub(crate) struct AnswerBody {
    body: Incoming,
    /// The connection that it comes from, if it may be used again after it.
    from: Option<Answering>,
    _lasting: Arc<dyn Send + Sync>,
}

impl AnswerBody {
    /// `lasting` is dropped when the client has the whole body, or has gone.
    pub(crate) fn new(
        body: Incoming,
        from: Option<Answering>,
        lasting: Arc<dyn Send + Sync>,
    ) -> AnswerBody {
        let mut body = AnswerBody {
            body,
            from,
            _lasting: lasting,
        };
        if body.is_end_stream() {
            body.ended();
        }
        body
    }

    /// All of it was received.
    fn ended(&mut self) {
        if let Some(from) = self.from.take() {
            from.ended();
        }
    }
}

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        match &frame {
            Some(Err(_)) => self.from = None,
            Some(Ok(_)) if !self.is_end_stream() => {}
            _ => self.ended(),
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }
}
