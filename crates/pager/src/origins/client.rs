//! The pager's side of origins: sends requests to `jiffy-origins`.

use super::request::{Answer, MAX_BEFORE, MAX_FETCH, MAX_LINE, MIN_RATE, Request};
use jiffy_store::{Bytes, ImageId, Origin, OriginError, Stop};
use jiffy_sys::fds;
use jiffy_sys::mutex::lock;
use jiffy_sys::sealed::Sealed;
use jiffy_sys::spawn::{Detached, Environment, spawn_detached};
use jiffy_wire::lines;
use jiffy_wire::pager::Origin as Described;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Write};
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

    /// The channel, whose other end is closed when `jiffy-origins` has ended.
    ///
    /// # Errors
    ///
    /// If the process has no more descriptors.
    pub fn channel(&self) -> io::Result<Option<OwnedFd>> {
        let channel = self.channel.as_ref();
        channel
            .map(|channel| channel.as_fd().try_clone_to_owned())
            .transpose()
    }

    fn fetch(&self, request: &Request, stop: &Stop) -> Result<Bytes, OriginError> {
        let length = request.end.saturating_sub(request.start);
        if length > MAX_FETCH {
            let sentence = format!("{length} bytes are too many for one request");
            return Err(OriginError::permanent(sentence));
        }
        let line = lines::encode(request).map_err(|error| {
            OriginError::permanent(format!("the request can't be written: {error}"))
        })?;
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
///
/// # Errors
///
/// If the program can't be started.
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

/// Sends a request on a connection and receives the answer; an error if the connection is broken.
pub(super) fn ask(
    mut connection: &UnixStream,
    line: &[u8],
    length: u64,
    stop: &Stop,
) -> io::Result<Result<Bytes, OriginError>> {
    let until = Instant::now() + ANSWER_TIME + Duration::from_secs(length / MIN_RATE);
    connection.write_all(line)?;
    let (answer, memory) = receive(connection, stop, until)?;
    let offset = match answer {
        Answer::Failed { why, again } => return Ok(Err(OriginError { why, again })),
        Answer::Bytes { offset } => offset,
    };
    let Some(memory) = memory.filter(|_| offset <= MAX_BEFORE) else {
        return Err(invalid("no memory came with the answer"));
    };
    let part = offset as usize..(offset + length) as usize;
    let bytes = Sealed::map(&File::from(memory), part)?;
    Ok(Ok(Bytes::of(bytes)))
}

/// Receives an answer and the descriptor that came with it, until `stop` is cancelled or `until`
/// has passed.
fn receive(
    connection: &UnixStream,
    stop: &Stop,
    until: Instant,
) -> io::Result<(Answer, Option<OwnedFd>)> {
    let mut line = Vec::new();
    let mut attached = Vec::new();
    while !line.contains(&b'\n') {
        wait_readable(connection, stop, until)?;
        let mut buffer = [0; 4096];
        let count = fds::recv_with_fds(connection, &mut buffer, &mut attached)?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        line.extend_from_slice(&buffer[..count]);
        if line.len() as u64 > MAX_LINE || attached.len() > 1 {
            return Err(invalid("the answer is too long"));
        }
    }
    // More bytes after the line are an error, too: they would be read as the next answer.
    Ok((serde_json::from_slice(&line)?, attached.pop()))
}

fn wait_readable(connection: &UnixStream, stop: &Stop, until: Instant) -> io::Result<()> {
    loop {
        let mut events = [PollFd::new(connection, PollFlags::IN)];
        match poll(&mut events, Some(&POLL_INTERVAL)) {
            Ok(1..) => return Ok(()),
            Ok(0) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        if stop.is_cancelled() {
            return Err(io::Error::other("the read was cancelled"));
        }
        if Instant::now() >= until {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
}

fn invalid(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
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

    fn fetch(&self, range: Range<u64>, stop: &Stop) -> Result<Bytes, OriginError> {
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
    use jiffy_sys::sealed::Unsealed;
    use std::io::{BufRead, BufReader};
    use std::thread;

    /// The outcome of a request for four bytes that is answered with `sent` and this memory.
    fn answered(
        sent: &'static [u8],
        memory: Option<File>,
        stop: &Stop,
    ) -> io::Result<Result<Bytes, OriginError>> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let theirs = thread::spawn(move || {
            let mut line = String::new();
            BufReader::new(&theirs).read_line(&mut line).unwrap();
            let attached: Vec<_> = memory.iter().map(AsFd::as_fd).collect();
            if !sent.is_empty() {
                fds::send_with_fds(&theirs, sent, &attached).unwrap();
            }
            theirs
        });
        let answer = ask(&ours, b"?\n", 4, stop);
        drop(theirs.join());
        answer
    }

    fn memory(bytes: &[u8]) -> File {
        let mut memory = Unsealed::new("test", bytes.len()).unwrap();
        memory.copy_from_slice(bytes);
        memory.seal().unwrap()
    }

    #[test]
    fn bytes_are_read_out_of_the_memory_that_comes_with_the_answer() {
        let sent = b"{\"bytes\":{\"offset\":2}}\n";
        let bytes = answered(sent, Some(memory(b"__four__")), &Stop::never()).unwrap();
        assert_eq!(*bytes.unwrap(), *b"four");
    }

    #[test]
    fn an_answer_without_the_bytes_ends_the_connection() {
        let unsealed = tempfile::tempfile().unwrap();
        unsealed.set_len(8).unwrap();
        let first: &[u8] = b"{\"bytes\":{\"offset\":0}}\n";
        let late: &[u8] = b"{\"bytes\":{\"offset\":5}}\n";
        let far: &[u8] = b"{\"bytes\":{\"offset\":18446744073709551615}}\n";
        let more: &[u8] = b"{\"bytes\":{\"offset\":0}}\nx";
        for (sent, memory) in [
            (first, None),
            (first, Some(unsealed)),
            (late, Some(memory(b"too few"))),
            (far, Some(memory(b"________"))),
            (more, Some(memory(b"four"))),
        ] {
            let error = answered(sent, memory, &Stop::never()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{sent:?}");
        }
    }

    #[test]
    fn a_stalled_answer_is_awaited_until_the_request_is_given_up() {
        for begun in [&b""[..], b"{", b"{\"bytes\":{\"offset\":0}}"] {
            let stop = Stop::new();
            let given_up = stop.clone();
            let later = thread::spawn(move || {
                thread::sleep(Duration::from_millis(50));
                given_up.cancel();
            });
            let answer = answered(begun, Some(memory(b"four")), &stop);
            assert!(answer.is_err(), "{begun:?}");
            later.join().unwrap();
        }
    }
}
