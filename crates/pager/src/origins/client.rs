//! The pager's side of origins: sends requests to `jiffy-origins`.

use super::request::{Answer, MAX_FETCH, MAX_LINE, MIN_RATE, Request};
use jiffy_store::{ImageId, Origin, OriginError, Stop};
use jiffy_sys::fds;
use jiffy_sys::mutex::lock;
use jiffy_sys::spawn::{Detached, Environment, spawn_detached};
use jiffy_wire::pager::Origin as Described;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How often a read checks whether its bytes are still wanted.
const POLL_INTERVAL: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 20_000_000,
};
/// The most time that an answer may take: this, and the time of its bytes at [`MIN_RATE`].
/// `jiffy-origins` has shorter limits of its own.
const ANSWER_TIME: Duration = Duration::from_secs(120);

/// The program that reads from origins, in the folder of this one.
const PROGRAM: &str = "jiffy-origins";

/// Reads from origins, by asking `jiffy-origins`.
#[derive(Debug)]
pub struct Reader {
    /// Where connections are sent.
    channel: Option<UnixStream>,
    idle: Mutex<Vec<UnixStream>>,
    /// The last number given to an origin.
    numbers: AtomicU64,
}

impl Reader {
    /// Sends requests over this channel of [`start`]; without one, no origin is reached.
    pub fn new(channel: Option<OwnedFd>) -> Reader {
        Reader {
            channel: channel.map(UnixStream::from),
            idle: Mutex::default(),
            numbers: AtomicU64::new(0),
        }
    }

    fn fetch(&self, request: &Request, stop: &Stop) -> Result<Vec<u8>, OriginError> {
        let length = request.end.saturating_sub(request.start);
        if length > MAX_FETCH {
            let sentence = format!("{length} bytes are too many for one request");
            return Err(OriginError::permanent(sentence));
        }
        let mut line = serde_json::to_vec(request).map_err(|error| {
            OriginError::permanent(format!("the request can't be written: {error}"))
        })?;
        line.push(b'\n');
        loop {
            let idle = lock(&self.idle).pop();
            let was_idle = idle.is_some();
            let connection = idle.map_or_else(|| self.connect(), Ok);
            let asked = connection.and_then(|connection| {
                let answer = ask(&connection, &line, length, stop)?;
                lock(&self.idle).push(connection);
                Ok(answer)
            });
            match asked {
                Ok(answer) => return answer,
                // The program may have been restarted since this connection was used.
                Err(error) if was_idle && is_disconnected(&error) => lock(&self.idle).clear(),
                Err(error) => {
                    let sentence = format!("{PROGRAM} gave no answer: {error}");
                    return Err(OriginError::transient(sentence));
                }
            }
        }
    }

    fn connect(&self) -> io::Result<UnixStream> {
        let none = || io::Error::other("it could not be started");
        let channel = self.channel.as_ref().ok_or_else(none)?;
        let (ours, theirs) = UnixStream::pair()?;
        fds::send_with_fds(channel, b"+", &[theirs.as_fd()])?;
        Ok(ours)
    }
}

/// Starts the program, which ends with the channel that is returned. It inherits the environment
/// and standard error.
pub fn start() -> io::Result<OwnedFd> {
    let this = std::env::current_exe()?;
    let program = this.with_file_name(PROGRAM);
    let (ours, theirs) = UnixStream::pair()?;
    let output = io::stderr();
    spawn_detached(&Detached {
        program: &program,
        arguments: &[] as &[&OsStr],
        directory: &std::env::current_dir()?,
        output: output.as_fd(),
        descriptors: &[theirs.as_fd()],
        environment: Environment::Inherited,
    })?;
    Ok(ours.into())
}

/// Sends a request on a connection and reads the answer; an error if the connection is broken.
fn ask(
    connection: &UnixStream,
    line: &[u8],
    length: u64,
    stop: &Stop,
) -> io::Result<Result<Vec<u8>, OriginError>> {
    let until = Instant::now() + ANSWER_TIME + Duration::from_secs(length / MIN_RATE);
    let mut output = connection;
    output.write_all(line)?;
    let mut input = BufReader::new(AnswerReader {
        connection,
        stop,
        until,
    });
    let mut answer = Vec::new();
    (&mut input).take(MAX_LINE).read_until(b'\n', &mut answer)?;
    if answer.is_empty() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let mut bytes = Vec::new();
    let answer = serde_json::from_slice(&answer)?;
    if matches!(answer, Answer::Bytes) {
        (&mut input).take(length).read_to_end(&mut bytes)?;
        if bytes.len() as u64 != length {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    // It would be read as the start of the next answer.
    if !input.buffer().is_empty() {
        let more = "unexpected bytes follow the answer";
        return Err(io::Error::new(io::ErrorKind::InvalidData, more));
    }
    Ok(match answer {
        Answer::Failed { why, again } => Err(OriginError { why, again }),
        Answer::Bytes => Ok(bytes),
    })
}

/// Reads an answer until `stop` is cancelled or `until` has passed.
struct AnswerReader<'a> {
    connection: &'a UnixStream,
    stop: &'a Stop,
    until: Instant,
}

impl Read for AnswerReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let mut events = [PollFd::new(self.connection, PollFlags::IN)];
            match poll(&mut events, Some(&POLL_INTERVAL)) {
                Ok(1..) => {
                    let mut connection = self.connection;
                    return connection.read(buffer);
                }
                Ok(0) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            if self.stop.is_cancelled() {
                // Not `Interrupted`: such a read would be repeated.
                return Err(io::Error::other("the read was cancelled"));
            }
            if Instant::now() >= self.until {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
    }
}

fn is_disconnected(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}

/// An origin of one image.
pub struct RemoteOrigin {
    reader: Arc<Reader>,
    described: Described,
    number: u64,
    id: ImageId,
    here: PathBuf,
}

impl RemoteOrigin {
    pub(super) fn new(
        reader: Arc<Reader>,
        described: &Described,
        id: ImageId,
        here: &Path,
    ) -> RemoteOrigin {
        RemoteOrigin {
            number: reader.numbers.fetch_add(1, Ordering::Relaxed),
            reader,
            described: described.clone(),
            id,
            here: here.to_owned(),
        }
    }
}

impl Origin for RemoteOrigin {
    fn name(&self) -> String {
        match &self.described {
            Described::Folder { folder } => format!("the folder {}", folder.display()),
            Described::Registry(origin) => origin.reference.clone(),
        }
    }

    fn waits_for(&self) -> String {
        match &self.described {
            Described::Folder { .. } => String::new(),
            Described::Registry(origin) => {
                let registry = origin.reference.split('/').next();
                registry.unwrap_or_default().to_owned()
            }
        }
    }

    fn fetch(&self, range: Range<u64>, stop: &Stop) -> Result<Vec<u8>, OriginError> {
        let request = Request {
            origin: self.described.clone(),
            number: self.number,
            id: self.id.0,
            here: self.here.clone(),
            start: range.start,
            end: range.end,
        };
        self.reader.fetch(&request, stop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    /// The outcome of a request for four bytes that is answered with `sent`.
    fn answered(sent: &'static [u8], stop: &Stop) -> io::Result<Result<Vec<u8>, OriginError>> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let theirs = thread::spawn(move || {
            let mut line = String::new();
            BufReader::new(&theirs).read_line(&mut line).unwrap();
            (&theirs).write_all(sent).unwrap();
            theirs
        });
        let answer = ask(&ours, b"?\n", 4, stop);
        drop(theirs.join());
        answer
    }

    #[test]
    fn a_stalled_answer_is_awaited_until_the_request_is_given_up() {
        let whole = answered(b"\"bytes\"\nfour", &Stop::never()).unwrap();
        assert_eq!(whole.unwrap(), b"four");
        for begun in [&b""[..], b"{", b"\"bytes\"\n", b"\"bytes\"\nfo"] {
            let stop = Stop::new();
            let given_up = stop.clone();
            let later = thread::spawn(move || {
                thread::sleep(Duration::from_millis(50));
                given_up.cancel();
            });
            assert!(answered(begun, &stop).is_err(), "{begun:?}");
            later.join().unwrap();
        }
    }

    #[test]
    fn bytes_after_an_answer_end_the_connection() {
        let error = answered(b"\"bytes\"\nfour!", &Stop::never()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
}
