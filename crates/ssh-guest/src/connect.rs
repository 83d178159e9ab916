//! A connection to a port or a socket, on stdin and stdout.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::thread;

/// The first byte of the output, written once the connection is established.
pub const CONNECTED: u8 = b'+';

/// Connects to a port, as the guest resolves the host's name.
///
/// # Errors
///
/// If there is no such port or nothing answers there, or if the connection ends with an error of
/// `read` or `write`. The error is a sentence.
pub fn port(host: &str, port: &str) -> Result<(), String> {
    let number: u16 = port
        .parse()
        .map_err(|_| format!("there is no port {port}"))?;
    let stream = TcpStream::connect((host, number))
        .map_err(|error| format!("{host}:{port} can't be reached: {error}"))?;
    // Nagle's algorithm would delay keystrokes.
    let _ = stream.set_nodelay(true);
    // The calls below are the same for all sockets.
    relay(UnixStream::from(OwnedFd::from(stream)))
}

/// Connects to a Unix socket.
///
/// # Errors
///
/// If nothing answers there, or if the connection ends with an error of `read` or `write`. The
/// error is a sentence.
pub fn socket(path: &str) -> Result<(), String> {
    let stream =
        UnixStream::connect(path).map_err(|error| format!("{path} can't be reached: {error}"))?;
    relay(stream)
}

/// Passes data both ways until the other end closes.
fn relay(stream: UnixStream) -> Result<(), String> {
    let failed = |error: io::Error| format!("the connection ended: {error}");
    let (mut input, mut output) = crate::stdio::unbuffered().map_err(failed)?;
    output.write_all(&[CONNECTED]).map_err(failed)?;
    let mut writer = stream.try_clone().map_err(failed)?;
    thread::spawn(move || {
        // An error is seen by the other direction, too.
        let _ = copy(&mut input, &mut writer);
        let _ = writer.shutdown(Shutdown::Write);
    });
    let mut reader = stream;
    copy(&mut reader, &mut output).map_err(failed)
}

/// Copies to the end. `io::copy` would use splice(2), which locks a pipe while it waits for a
/// socket's data: the agent, which reads the pipe, would block as long.
fn copy(from: &mut impl Read, to: &mut impl Write) -> io::Result<()> {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(count) => to.write_all(&buffer[..count])?,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}
