//! How many connections wait until a server accepts them.

use rustix::net::listen;
use std::io;
use std::os::fd::AsFd;

/// Backlog of a server with many clients. net.core.somaxconn limits it further; its default is the
/// same.
pub const LARGE: i32 = 4096;

/// Gives a listening TCP socket a [`LARGE`] backlog. The standard library and tokio make it 128:
/// Linux drops the handshakes of further clients of a burst, so that they wait for a second, or are
/// reset after their first bytes.
///
/// # Errors
///
/// If listen(2) fails.
pub fn enlarge(listener: impl AsFd) -> io::Result<()> {
    Ok(listen(listener, LARGE)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    #[test]
    fn a_burst_of_clients_connects_before_the_first_is_accepted() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        enlarge(&listener).unwrap();
        let address = listener.local_addr().unwrap();
        let clients: Vec<_> = (0..300)
            .map(|_| TcpStream::connect_timeout(&address, Duration::from_secs(20)).unwrap())
            .collect();
        for _ in &clients {
            listener.accept().unwrap();
        }
    }
}
