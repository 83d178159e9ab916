//! A minimal HTTP client for a node.

use jiffy_wire::agent::{ExecInput, ExecOutput, ExitStatus, Stream};
use jiffy_wire::api::{ApiError, ErrorKind};
use jiffy_wire::frame::{self, Decoder};
use serde::{Serialize, de::DeserializeOwned};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Longer than anything in these tests takes; a test that hangs fails.
pub const TIMEOUT: Duration = Duration::from_secs(300);

/// A complete answer.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn json<T: DeserializeOwned>(&self) -> T {
        assert_eq!(self.status, 200, "{}", String::from_utf8_lossy(&self.body));
        serde_json::from_slice(&self.body).unwrap()
    }

    /// The error: checks that it has this kind and its status, and reads as a sentence.
    pub fn error(&self, kind: ErrorKind) -> ApiError {
        let text = String::from_utf8_lossy(&self.body);
        let error: ApiError =
            serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("{text}"));
        assert_eq!(error.kind, kind, "{text}");
        assert_eq!(self.status, error.status(), "{text}");
        assert!(
            error.message.ends_with('.') || error.message.contains("last line"),
            "{text}"
        );
        error
    }
}

/// Sends one request on one connection.
pub fn request(mut stream: impl Read + Write, head: &str, body: &[u8]) -> io::Result<Answer> {
    let length = body.len();
    write!(
        stream,
        "{head}\r\nHost: node\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
    )?;
    // A node that refuses may not read the body.
    let _ = stream.write_all(body);
    answer(stream)
}

/// The answer to a request that was sent.
pub fn answer(stream: impl Read) -> io::Result<Answer> {
    let mut reader = BufReader::new(stream);
    let (status, headers) = read_head(&mut reader)?;
    let mut body = Vec::new();
    if headers.contains("transfer-encoding: chunked") {
        loop {
            let mut line = String::new();
            reader.read_line(&mut line)?;
            let size = usize::from_str_radix(line.trim(), 16).map_err(io::Error::other)?;
            let start = body.len();
            body.resize(start + size, 0);
            reader.read_exact(&mut body[start..])?;
            reader.read_exact(&mut [0; 2])?;
            if size == 0 {
                break;
            }
        }
    } else {
        // Not read to the end: a node that left some of the request unread resets the connection
        // after its answer.
        body.resize(content_length(&headers), 0);
        reader.read_exact(&mut body)?;
    }
    Ok(Answer { status, body })
}

fn read_head(reader: &mut impl BufRead) -> io::Result<(u16, String)> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if reader.read_line(&mut head)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    let status = head[9..12].parse().map_err(io::Error::other)?;
    Ok((status, head.to_lowercase()))
}

/// The length in this header, in lower case; 0 after a 204.
fn content_length(headers: &str) -> usize {
    let Some(length) = headers.split("content-length: ").nth(1) else {
        return 0;
    };
    length.split("\r\n").next().unwrap().parse().unwrap()
}

/// A connection to the node's Unix socket.
pub fn connect(socket: &Path) -> io::Result<UnixStream> {
    let stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    Ok(stream)
}

/// A request that became a stream of frames.
#[derive(Debug)]
pub struct Frames {
    pub stream: UnixStream,
    decoder: Decoder,
    /// The header of the answer, in lower case.
    pub head: String,
}

impl Frames {
    /// Upgrades, or returns the refusal.
    pub fn open(mut stream: UnixStream, path: &str, body: &[u8]) -> Result<Frames, Answer> {
        let length = body.len();
        write!(
            stream,
            "POST {path} HTTP/1.1\r\nHost: node\r\nConnection: upgrade\r\nUpgrade: jiffy-frames\r\nContent-Length: {length}\r\n\r\n"
        )
        .unwrap();
        // A node that refuses may not read the body.
        let _ = stream.write_all(body);
        // Read byte by byte, because frames follow the header at once.
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            head.push(byte[0]);
        }
        let (status, head) = read_head(&mut &head[..]).unwrap();
        if status != 101 {
            let mut body = vec![0; content_length(&head)];
            stream.read_exact(&mut body).unwrap();
            return Err(Answer { status, body });
        }
        Ok(Frames {
            stream,
            decoder: Decoder::new(),
            head,
        })
    }

    pub fn send<T: Serialize>(&mut self, message: &T) {
        self.stream
            .write_all(&frame::to_vec(message).unwrap())
            .unwrap();
    }

    /// The next message; `None` at the end of the stream, which must be between messages.
    pub fn next<T: DeserializeOwned>(&mut self) -> Option<T> {
        let mut buffer = [0; 64 * 1024];
        loop {
            if let Some(message) = self.decoder.next().unwrap() {
                return Some(message);
            }
            match self.stream.read(&mut buffer) {
                Ok(0) => {
                    assert_eq!(
                        self.decoder.pending(),
                        0,
                        "the stream ends within a message"
                    );
                    return None;
                }
                Ok(got) => self.decoder.push(&buffer[..got]),
                // With a time limit, a read is not restarted after a signal.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Reads until stdout contains this text.
    pub fn until(&mut self, text: &str) {
        let mut seen = Vec::new();
        while !String::from_utf8_lossy(&seen).contains(text) {
            match self.next() {
                Some(ExecOutput::Started { .. }) => {}
                Some(ExecOutput::Output { data, .. }) => seen.extend(data),
                other => panic!("{other:?} before {text:?}"),
            }
        }
    }

    /// Everything up to the last message.
    pub fn finish(mut self) -> Finished {
        let mut finished = Finished::default();
        while let Some(message) = self.next() {
            assert!(finished.end.is_none(), "{message:?} after the end");
            match message {
                ExecOutput::Started { .. } => finished.started = true,
                ExecOutput::Output { stream, data } => match stream {
                    Stream::Stdout => finished.stdout.extend(data),
                    Stream::Stderr => finished.stderr.extend(data),
                },
                end => finished.end = Some(end),
            }
        }
        finished
    }

    pub fn input(&mut self, bytes: &[u8]) {
        for piece in bytes.chunks(frame::MAX_DATA) {
            self.send(&ExecInput::Stdin(piece.to_vec()));
        }
    }
}

/// The results of a program.
#[derive(Debug, Default)]
pub struct Finished {
    pub started: bool,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub end: Option<ExecOutput>,
}

impl Finished {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// Its exit status.
    pub fn status(&self) -> ExitStatus {
        match &self.end {
            Some(ExecOutput::Exited(status)) => *status,
            other => panic!("it ended with {other:?}"),
        }
    }

    /// The message of a lost program.
    pub fn lost(&self) -> String {
        match &self.end {
            Some(ExecOutput::Lost { message, .. }) => message.clone(),
            other => panic!("it ended with {other:?}"),
        }
    }
}

impl Frames {
    /// A second handle of the connection, for writing.
    pub fn clone_writer(frames: &Frames) -> Frames {
        Frames {
            stream: frames.stream.try_clone().unwrap(),
            decoder: Decoder::new(),
            head: String::new(),
        }
    }
}
