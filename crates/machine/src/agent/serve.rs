//! Takes connections, checks the token, does what is asked.

use super::{exec, power};
use crate::protocol::{Hello, Receiver, Request, VERSION};
use std::io;
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

/// How long a new connection has to say who it is.
const HELLO_PATIENCE: Duration = Duration::from_secs(60);

/// Serves for ever, one thread for each connection.
pub fn serve(listener: &TcpListener, token: &str) -> io::Result<()> {
    loop {
        let (stream, _) = match listener.accept() {
            Ok(connection) => connection,
            Err(error) => {
                tracing::warn!("a connection could not be taken: {error}");
                std::thread::sleep(Duration::from_millis(50));
                continue;
            }
        };
        let token = token.to_owned();
        std::thread::Builder::new()
            .name("connection".into())
            .spawn(move || {
                if let Err(error) = connection(stream, &token) {
                    tracing::info!("a connection ended: {error}");
                }
            })?;
    }
}

fn connection(stream: TcpStream, token: &str) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(HELLO_PATIENCE))?;
    let mut receiver = Receiver::new(stream.try_clone()?);
    let refused = || io::Error::from(io::ErrorKind::PermissionDenied);
    let hello: Hello = receiver.receive()?.ok_or_else(refused)?;
    if hello.version != VERSION || !same(hello.token.as_bytes(), token.as_bytes()) {
        return Err(refused());
    }
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
            power::off(Duration::from_millis(grace_ms.into()));
            Ok(())
        }
    }
}

/// Compares in a time that does not tell where the difference is.
fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |sum, (a, b)| sum | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_the_same_only_whole() {
        assert!(same(b"abc", b"abc"));
        assert!(!same(b"abc", b"abd"));
        assert!(!same(b"abc", b"ab"));
        assert!(!same(b"", b"a"));
    }
}
