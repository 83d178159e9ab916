//! The socket of a client. Its errors are detected even while nothing is read or written.

use rustix::net::Shutdown;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;

/// A client's connection. Clones share the socket.
#[derive(Debug, Clone)]
pub(crate) struct Socket(Arc<TcpStream>);

impl Socket {
    pub(crate) fn new(stream: TcpStream) -> Socket {
        Socket(Arc::new(stream))
    }

    /// Peeks the first byte that the client sends.
    pub(crate) async fn first_byte(&self) -> io::Result<Option<u8>> {
        let mut first = [0];
        let count = self.0.peek(&mut first).await?;
        Ok((count == 1).then_some(first[0]))
    }

    /// Waits until the connection is broken: the client has reset it, or does not answer. A
    /// shutdown of the client's side does not count.
    pub(crate) async fn broken(&self) {
        // This wait fails only if the runtime shuts down.
        let _ = self.0.ready(Interest::ERROR).await;
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            ready!(self.0.poll_read_ready(context))?;
            match self.0.try_read_buf(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => return Poll::Ready(read.map(drop)),
            }
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(context, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.0.poll_write_ready(context))?;
            match self.0.try_write_vectored(slices) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => return Poll::Ready(written),
            }
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(match rustix::net::shutdown(&*self.0, Shutdown::Write) {
            // It is closed already.
            Ok(()) | Err(rustix::io::Errno::NOTCONN) => Ok(()),
            Err(error) => Err(error.into()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::sockopt::set_socket_linger;
    use std::time::Duration;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;
    use tokio::time::timeout;

    #[tokio::test]
    async fn a_reset_is_noticed_and_a_half_close_is_not() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut client = TcpStream::connect(address).await.unwrap();
        let mut socket = Socket::new(listener.accept().await.unwrap().0);
        let watched = socket.clone();
        client.write_all(b"question").await.unwrap();
        client.shutdown().await.unwrap();
        assert_eq!(socket.first_byte().await.unwrap(), Some(b'q'));
        let mut asked = String::new();
        socket.read_to_string(&mut asked).await.unwrap();
        assert_eq!(asked, "question");
        let moment = Duration::from_millis(200);
        assert!(timeout(moment, watched.broken()).await.is_err());
        socket.write_all(b"answer").await.unwrap();
        let mut answer = [0; 6];
        client.read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer, b"answer");
        assert!(timeout(moment, watched.broken()).await.is_err());
        set_socket_linger(&client, Some(Duration::ZERO)).unwrap();
        drop(client);
        let patience = Duration::from_secs(10);
        timeout(patience, watched.broken()).await.expect("a reset");
    }

    #[tokio::test]
    async fn shutdown_is_sent_while_clones_of_the_socket_exist() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut client = TcpStream::connect(address).await.unwrap();
        let mut socket = Socket::new(listener.accept().await.unwrap().0);
        let _other = socket.clone();
        socket.write_all(b"all").await.unwrap();
        socket.shutdown().await.unwrap();
        let mut all = String::new();
        client.read_to_string(&mut all).await.unwrap();
        assert_eq!(all, "all");
    }
}
