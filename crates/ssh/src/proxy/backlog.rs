//! Bounds the data that programs have not read yet.
//!
//! SSH bounds it by a window for each channel, but russh opens the window as soon as data arrives,
//! and offers no way to open it when the data is consumed. Waiting in russh's handler would stop
//! the whole connection, output included. So the input of all channels is counted here, and above a
//! limit nothing more is read from the client, while output continues.

use jiffy_sys::mutex::lock;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};
use tokio::io::{AsyncRead, ReadBuf};

/// Nothing is read from the client while more than this is queued, in bytes.
pub const LIMIT: usize = 64 * 1024 * 1024;

/// The amount of queued data.
#[derive(Debug, Default)]
pub struct Backlog(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    bytes: usize,
    reader: Option<Waker>,
}

impl Backlog {
    /// Counts data until the returned share is dropped.
    pub fn add(self: &Arc<Backlog>, bytes: usize) -> Share {
        self.state().bytes += bytes;
        Share {
            bytes,
            backlog: self.clone(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0)
    }
}

/// A share of the backlog.
#[derive(Debug)]
pub struct Share {
    bytes: usize,
    backlog: Arc<Backlog>,
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut state = self.backlog.state();
        state.bytes -= self.bytes;
        if state.bytes <= LIMIT
            && let Some(reader) = state.reader.take()
        {
            reader.wake();
        }
    }
}

/// A stream that is not read while the backlog is over its limit.
#[derive(Debug)]
pub struct Throttled<R> {
    stream: R,
    backlog: Arc<Backlog>,
}

impl<R> Throttled<R> {
    /// Reads from `stream`.
    pub fn new(stream: R, backlog: &Arc<Backlog>) -> Throttled<R> {
        Throttled {
            stream,
            backlog: backlog.clone(),
        }
    }
}

impl<R: AsyncRead + Unpin> AsyncRead for Throttled<R> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut state = self.backlog.state();
        if state.bytes > LIMIT {
            state.reader = Some(context.waker().clone());
            return Poll::Pending;
        }
        drop(state);
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::io::AsyncReadExt;

    #[test]
    fn reading_pauses_above_the_backlog_limit() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap();
        runtime.block_on(async {
            let backlog = Arc::new(Backlog::default());
            let mut paced = Throttled::new(&b"abc"[..], &backlog);
            let full = backlog.add(LIMIT);
            assert_eq!(paced.read_u8().await.unwrap(), b'a');
            let more = backlog.add(1);
            let short = Duration::from_millis(20);
            assert!(tokio::time::timeout(short, paced.read_u8()).await.is_err());
            let reading = tokio::spawn(async move { paced.read_u8().await.unwrap() });
            tokio::task::yield_now().await;
            drop(more);
            assert_eq!(reading.await.unwrap(), b'b');
            drop(full);
            assert_eq!(backlog.state().bytes, 0);
        });
    }
}
