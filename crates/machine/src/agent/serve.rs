//! Accepts connections, checks the token and serves requests.

use super::{exec, power};
use crate::protocol::{Hello, OLDEST, Receiver, Request, VERSION};
use jiffy_sys::mutex::lock;
use std::collections::VecDeque;
use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How long a new connection may take to send its hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(60);
/// Most connections without a complete hello; one more closes the oldest of them.
const MOST_UNAUTHENTICATED: usize = 64;

/// A connection's work, for a thread of its own.
type Work = Box<dyn FnOnce() + Send>;

/// Serves connections forever, each in its own thread.
pub fn serve(listener: &TcpListener, token: &str) {
    let mut server = Server::new(token, |work| {
        let thread = std::thread::Builder::new().name("connection".into());
        thread.spawn(work).map(drop)
    });
    loop {
        server.next(listener);
    }
}

struct Server<S> {
    token: Arc<str>,
    spawn: S,
    unauthenticated: Arc<UnauthenticatedList>,
}

impl<S: FnMut(Work) -> io::Result<()>> Server<S> {
    fn new(token: &str, spawn: S) -> Server<S> {
        Server {
            token: token.into(),
            spawn,
            unauthenticated: Arc::default(),
        }
    }

    /// Accepts one connection. If it can't be served, only that connection is closed.
    fn next(&mut self, listener: &TcpListener) {
        let served = listener.accept().and_then(|(stream, _)| {
            let entry = self.unauthenticated.register(&stream)?;
            let token = Arc::clone(&self.token);
            (self.spawn)(Box::new(move || {
                if let Err(error) = connection(stream, &token, entry) {
                    tracing::info!("a connection ended: {error}");
                }
            }))
        });
        if let Err(error) = served {
            tracing::warn!("a connection could not be served: {error}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Connections without a complete hello, the oldest first.
#[derive(Default)]
struct UnauthenticatedList(Mutex<VecDeque<(u64, TcpStream)>>);

/// A connection in [`UnauthenticatedList`]; removed when this is dropped.
struct UnauthenticatedEntry {
    all: Arc<UnauthenticatedList>,
    number: u64,
}

impl UnauthenticatedList {
    fn register(self: &Arc<Self>, stream: &TcpStream) -> io::Result<UnauthenticatedEntry> {
        let stream = stream.try_clone()?;
        let mut all = lock(&self.0);
        if all.len() >= MOST_UNAUTHENTICATED
            && let Some((_, oldest)) = all.pop_front()
        {
            let _ = oldest.shutdown(Shutdown::Both);
        }
        let number = all.back().map_or(0, |(last, _)| last + 1);
        all.push_back((number, stream));
        Ok(UnauthenticatedEntry {
            all: Arc::clone(self),
            number,
        })
    }
}

impl Drop for UnauthenticatedEntry {
    fn drop(&mut self) {
        let mut all = lock(&self.all.0);
        all.retain(|(number, _)| *number != self.number);
    }
}

fn connection(stream: TcpStream, token: &str, entry: UnauthenticatedEntry) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(HELLO_TIMEOUT))?;
    let mut receiver = Receiver::new(stream.try_clone()?);
    let refused = || io::Error::from(io::ErrorKind::PermissionDenied);
    let hello: Hello = receiver.receive()?.ok_or_else(refused)?;
    let served = (OLDEST..=VERSION).contains(&hello.version);
    if !served || !equal_in_constant_time(hello.token.as_bytes(), token.as_bytes()) {
        return Err(refused());
    }
    drop(entry);
    let Some(request) = receiver.receive()? else {
        return Ok(());
    };
    stream.set_read_timeout(None)?;
    match request {
        Request::Exec {
            command,
            keep_output,
        } => exec::run(receiver, stream, &command, keep_output),
        Request::PowerOff { grace_ms } => {
            power::power_off(Duration::from_millis(grace_ms.into()));
            Ok(())
        }
    }
}

/// Compares in constant time.
fn equal_in_constant_time(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |sum, (a, b)| sum | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    #[test]
    fn a_failed_thread_start_closes_only_that_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connect = || TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut refused = 0;
        let mut server = Server::new("token", |work: Work| {
            if refused < 2 {
                refused += 1;
                return Err(io::ErrorKind::WouldBlock.into());
            }
            work();
            Ok(())
        });
        for _ in 0..3 {
            let mut client = connect();
            // The client closes without a hello; the server's thread then closes the connection.
            client.shutdown(Shutdown::Write).unwrap();
            server.next(&listener);
            let mut rest = Vec::new();
            let _ = client.read_to_end(&mut rest);
        }
        drop(server);
        assert_eq!(refused, 2);
    }

    #[test]
    fn the_oldest_unauthenticated_connection_is_closed() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let mut kept = Vec::new();
        let unauthenticated = {
            let mut server = Server::new("token", |work: Work| {
                std::thread::spawn(work);
                Ok(())
            });
            for _ in 0..MOST_UNAUTHENTICATED + 1 {
                let mut client = TcpStream::connect(address).unwrap();
                // An incomplete message.
                client.write_all(&[0]).unwrap();
                server.next(&listener);
                kept.push(client);
            }
            server.unauthenticated
        };
        // Only the oldest connection is closed.
        kept[0].read_to_end(&mut Vec::new()).unwrap();
        while unauthenticated.0.lock().unwrap().len() > MOST_UNAUTHENTICATED {
            std::thread::yield_now();
        }
        let last = kept.last_mut().unwrap();
        last.set_nonblocking(true).unwrap();
        let waits = last.read(&mut [0]).unwrap_err();
        assert_eq!(waits.kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn known_versions_are_served_and_newer_ones_refused() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let said = |version| {
            let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (stream, _) = listener.accept().unwrap();
            let token = "token".to_owned();
            crate::protocol::send(&mut client, &Hello { version, token }).unwrap();
            client.shutdown(Shutdown::Write).unwrap();
            let all = Arc::new(UnauthenticatedList::default());
            let entry = all.register(&stream).unwrap();
            connection(stream, "token", entry)
        };
        for version in OLDEST..=VERSION {
            said(version).unwrap();
        }
        let refused = said(VERSION + 1).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
    }

    #[test]
    fn token_comparison_needs_equal_length_and_bytes() {
        assert!(equal_in_constant_time(b"abc", b"abc"));
        assert!(!equal_in_constant_time(b"abc", b"abd"));
        assert!(!equal_in_constant_time(b"abc", b"ab"));
        assert!(!equal_in_constant_time(b"", b"a"));
    }
}
