//! The line a host program sends before it is connected: `CONNECT <port>\n`.

use rustix::net::{RecvFlags, recv};
use std::io::{self, Read};
use std::os::unix::net::UnixStream;

/// Longest line accepted, bytes, including its newline; the longest useful one has 20.
pub const LINE_LIMIT: usize = 32;

/// A host program that has connected but not sent its line.
pub struct Handshake {
    /// Its socket.
    pub stream: UnixStream,
}

/// The state of a handshake.
#[derive(Debug, PartialEq, Eq)]
pub enum Progress {
    /// The line is not complete.
    Waiting,
    /// The program wants to connect to this port of the guest.
    Connect(u32),
    /// The line is not valid, or the program is gone.
    Refused,
}

impl Handshake {
    /// Peeks at the received bytes. Reads the line once it is complete, and not a byte more: the
    /// bytes after it are for the guest.
    pub fn advance(&mut self) -> Progress {
        let mut line = [0; LINE_LIMIT];
        let seen = loop {
            match recv(&self.stream, &mut line[..], RecvFlags::PEEK) {
                Ok((0, _)) => return Progress::Refused,
                Ok((count, _)) => break count,
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Progress::Waiting,
                Err(_) => return Progress::Refused,
            }
        };
        let progress = parse(&line[..seen]);
        if let Line::Port { port, length } = progress {
            return match self.take(&mut line[..length]) {
                Ok(()) => Progress::Connect(port),
                Err(_) => Progress::Refused,
            };
        }
        match progress {
            Line::Incomplete => Progress::Waiting,
            _ => Progress::Refused,
        }
    }

    fn take(&mut self, line: &mut [u8]) -> io::Result<()> {
        self.stream.read_exact(line)
    }
}

/// The result of parsing a first line.
#[derive(Debug, PartialEq, Eq)]
enum Line {
    Incomplete,
    Port { port: u32, length: usize },
    Invalid,
}

fn parse(bytes: &[u8]) -> Line {
    const WORD: &[u8] = b"CONNECT ";
    let Some(end) = bytes.iter().position(|byte| *byte == b'\n') else {
        let common = bytes.len().min(WORD.len());
        return match bytes[..common] == WORD[..common] && bytes.len() < LINE_LIMIT {
            true => Line::Incomplete,
            false => Line::Invalid,
        };
    };
    let line = &bytes[..end];
    let port = line
        .strip_suffix(b"\r")
        .unwrap_or(line)
        .strip_prefix(WORD)
        // `parse` alone would also accept a sign.
        .filter(|digits| digits.iter().all(u8::is_ascii_digit))
        .and_then(|digits| std::str::from_utf8(digits).ok()?.parse().ok());
    match port {
        Some(port) => Line::Port {
            port,
            length: end + 1,
        },
        None => Line::Invalid,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn lines() {
        let port = |port, length| Line::Port { port, length };
        for (bytes, line) in [
            (&b"CONNECT 1024\n"[..], port(1024, 13)),
            (b"CONNECT 1024\nGET /", port(1024, 13)),
            (b"CONNECT 7\r\n", port(7, 11)),
            (b"CONNECT 4294967295\n", port(u32::MAX, 19)),
            (b"CONNECT 00000000000000000000007\n", port(7, 32)),
            (b"CONNECT 4294967296\n", Line::Invalid),
            (b"CONNECT +7\n", Line::Invalid),
            (b"CONNECT -7\n", Line::Invalid),
            (b"CONNECT \n", Line::Invalid),
            (b"CONNECT 7 \n", Line::Invalid),
            (b"CONNECT  7\n", Line::Invalid),
            (b"connect 7\n", Line::Invalid),
            (b"\n", Line::Invalid),
            (b"", Line::Incomplete),
            (b"CONN", Line::Incomplete),
            (b"CONNECT 7", Line::Incomplete),
            (b"GET /", Line::Invalid),
            (b"CONNECT 000000000000000000000007", Line::Invalid),
        ] {
            assert_eq!(parse(bytes), line, "{:?}", String::from_utf8_lossy(bytes));
        }
    }

    #[test]
    fn bytes_after_the_connect_line_stay_in_the_socket() {
        let (mut program, stream) = UnixStream::pair().unwrap();
        stream.set_nonblocking(true).unwrap();
        let mut handshake = Handshake { stream };
        assert_eq!(handshake.advance(), Progress::Waiting);
        program.write_all(b"CONNECT 5").unwrap();
        assert_eq!(handshake.advance(), Progress::Waiting);
        program.write_all(b"\nhello").unwrap();
        assert_eq!(handshake.advance(), Progress::Connect(5));
        let mut rest = [0; 16];
        let count = handshake.stream.read(&mut rest).unwrap();
        assert_eq!(&rest[..count], b"hello");
        drop(program);
        assert_eq!(handshake.advance(), Progress::Refused);
    }
}
