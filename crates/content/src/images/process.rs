//! Makes an image in a process of its own, `jiffy-import`.
//!
//! The node opens all files, starts the process, and waits for its answer. The process decompresses
//! and parses what others wrote, so nothing that it says is trusted beyond what it may know: the
//! node itself determines the image's size and digest, when the process is dead and can't change the
//! file any more.

use super::ROOT;
use jiffy_sys::fork::Child;
use jiffy_sys::spawn::{Detached, Environment, spawn_detached};
use jiffy_wire::import::{
    Answer, FailureKind, MAX_LAYERS, Made, MessageError, Request, SCRATCH, Source, decode_answer,
    encode, length,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use thiserror::Error;

/// How often it is checked whether the import was cancelled.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Longest time in which the process neither takes nor sends anything. It reports ten times a second
/// while it reads and writes; only planning an image is silent.
const MAX_SILENCE: Duration = Duration::from_secs(600);
/// How long a process may live on after it has closed its channel.
const END_TIME: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};
/// Most reports of progress: at first, and for each second.
const MAX_REPORTS: u64 = 100;
/// Bytes that are streamed, read or hashed at a time; also the size of the pipe.
const PIECE: usize = 1 << 20;
const SIGABRT: i32 = rustix::process::Signal::ABORT.as_raw();
const SIGKILL: i32 = rustix::process::Signal::KILL.as_raw();
/// Bytes for which room is made ahead of an answer's arrival.
const STEP: usize = 64 << 10;

/// Why there is no image.
#[derive(Debug, Error)]
pub(crate) enum ImportError {
    /// The source is not acceptable. A sentence without its first capital letter and full stop.
    #[error("{0}")]
    Source(String),
    /// The stream of the archive ended with an error.
    #[error("the archive can't be read")]
    Stream(#[source] io::Error),
    /// The disk is full.
    #[error("the disk is full")]
    Full,
    /// The node can't make a file or read one.
    #[error("{} can't be used", .0.display())]
    File(PathBuf, #[source] io::Error),
    /// The program can't be started.
    #[error("the program {} can't be started", .0.display())]
    Start(PathBuf, #[source] io::Error),
    /// The process has ended, or does not work.
    #[error("{0}")]
    Process(String),
    /// The watcher cancelled it.
    #[error("the import was cancelled")]
    Cancelled,
}

/// Watches an import.
pub(crate) trait Watch {
    /// Reports bytes that were read or written.
    fn moved(&self, done: u64, total: u64);
    /// Whether it was cancelled.
    fn is_cancelled(&self) -> bool;
}

/// What is imported.
pub(crate) struct Input<'a> {
    /// Its description.
    pub source: Source,
    /// Its files, as many as the description names.
    pub files: Vec<File>,
    /// The stream in place of a file.
    pub stream: Option<&'a mut dyn Read>,
}

/// A new image, in the file [`ROOT`] of its folder, synced.
#[derive(Debug)]
pub(crate) struct Imported {
    /// BLAKE3, hexadecimal.
    pub digest: String,
    /// Bytes.
    pub size: u64,
    /// What the process said.
    pub made: Made,
}

/// Starts processes that make images.
#[derive(Debug, Clone)]
pub struct Importer {
    program: PathBuf,
}

impl Importer {
    /// With this program.
    pub fn new(program: PathBuf) -> Importer {
        Importer { program }
    }

    /// Makes an image of the input in this folder: blocking. After an error the file may exist; the
    /// caller removes the folder.
    pub(crate) fn import(
        &self,
        input: Input<'_>,
        folder: &Path,
        watch: &dyn Watch,
    ) -> Result<Imported, ImportError> {
        if let Source::Layers { layers, .. } = &input.source
            && layers.len() > MAX_LAYERS
        {
            return Err(ImportError::Source(format!(
                "the image has {} layers, the limit is {MAX_LAYERS}",
                layers.len()
            )));
        }
        let path = folder.join(ROOT);
        let failed = |error| file_error(&path, error);
        let image = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)
            .map_err(failed)?;
        let request = Request {
            source: input.source,
            folder: folder.display().to_string(),
        };
        let request = encode(&request).map_err(|error| ImportError::Source(error.to_string()))?;
        let (mut process, pipe) =
            self.start(&image, folder, input.files, input.stream.is_some())?;
        process.send(&request)?;
        if let (Some(stream), Some(pipe)) = (input.stream, pipe) {
            pump(stream, &pipe, watch)?;
        }
        let made = process.made(watch)?;
        // Nobody else has the file open from here on.
        drop(process);
        let (size, digest) = digest(&image, watch, &path)?;
        image.sync_all().map_err(failed)?;
        jiffy_sys::durable::sync_folder_of(&path).map_err(failed)?;
        Ok(Imported { digest, size, made })
    }

    /// Starts the process; also returns the writing end of the pipe that it reads.
    fn start(
        &self,
        image: &File,
        folder: &Path,
        files: Vec<File>,
        piped: bool,
    ) -> Result<(Process, Option<OwnedFd>), ImportError> {
        let scratch = (0..SCRATCH)
            .map(|_| tempfile::tempfile_in(folder))
            .collect::<io::Result<Vec<File>>>()
            .map_err(|error| file_error(folder, error))?;
        let failed = |error: io::Error| ImportError::Start(self.program.clone(), error);
        let (channel, theirs) = UnixStream::pair().map_err(failed)?;
        let pipe = match piped {
            true => Some(pipe().map_err(|error| failed(error.into()))?),
            false => None,
        };
        let mut descriptors: Vec<BorrowedFd<'_>> = vec![theirs.as_fd(), image.as_fd()];
        descriptors.extend(scratch.iter().map(AsFd::as_fd));
        descriptors.extend(files.iter().map(AsFd::as_fd));
        descriptors.extend(pipe.iter().map(|(reading, _)| reading.as_fd()));
        let null = OpenOptions::new()
            .write(true)
            .open("/dev/null")
            .map_err(failed)?;
        let pid = spawn_detached(&Detached {
            program: &self.program,
            arguments: &[],
            directory: Path::new("/"),
            output: null.as_fd(),
            descriptors: &descriptors,
            environment: Environment::Empty,
        })
        .map_err(failed)?;
        let child = Child::started(pid).map_err(failed)?;
        channel
            .set_read_timeout(Some(CHECK_INTERVAL))
            .and_then(|()| channel.set_write_timeout(Some(MAX_SILENCE)))
            .map_err(failed)?;
        let process = Process { child, channel };
        Ok((process, pipe.map(|(_, writing)| writing)))
    }
}

fn file_error(path: &Path, error: io::Error) -> ImportError {
    match jiffy_sys::durable::is_full(&error) {
        true => ImportError::Full,
        false => ImportError::File(path.to_owned(), error),
    }
}

/// A pipe, of which the writing end does not block.
fn pipe() -> Result<(OwnedFd, OwnedFd), Errno> {
    let (reading, writing) = pipe_with(PipeFlags::CLOEXEC)?;
    // Only faster; the kernel may refuse it.
    let _ = fcntl_setpipe_size(&writing, PIECE);
    rustix::io::ioctl_fionbio(&writing, true)?;
    Ok((reading, writing))
}

/// Writes the stream into the pipe to its end, or until the process does not read any more.
fn pump(stream: &mut dyn Read, pipe: &OwnedFd, watch: &dyn Watch) -> Result<(), ImportError> {
    let mut piece = vec![0; PIECE / 4];
    let mut taken = Instant::now();
    loop {
        let got = match stream.read(&mut piece) {
            Ok(0) => return Ok(()),
            Ok(got) => got,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(ImportError::Stream(error)),
        };
        let mut rest = &piece[..got];
        while !rest.is_empty() {
            match rustix::io::write(pipe, rest) {
                Ok(written) => {
                    rest = &rest[written..];
                    taken = Instant::now();
                }
                // It has failed, and says why.
                Err(Errno::PIPE) => return Ok(()),
                Err(Errno::AGAIN) => {
                    let mut polled = [PollFd::new(pipe, PollFlags::OUT)];
                    let _ = poll(&mut polled, Some(&interval()));
                    check(taken, watch)?;
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(ImportError::Stream(error.into())),
            }
        }
        // The stream may have been slow.
        taken = Instant::now();
    }
}

fn interval() -> Timespec {
    Timespec {
        tv_sec: 0,
        tv_nsec: CHECK_INTERVAL.as_nanos() as i64,
    }
}

/// Ends an import that was cancelled, or whose process was silent for too long.
fn check(heard: Instant, watch: &dyn Watch) -> Result<(), ImportError> {
    if watch.is_cancelled() {
        return Err(ImportError::Cancelled);
    }
    if heard.elapsed() >= MAX_SILENCE {
        return Err(ImportError::Process(format!(
            "the import process did nothing for {} minutes",
            MAX_SILENCE.as_secs() / 60
        )));
    }
    Ok(())
}

/// The size and the digest of an image.
fn digest(image: &File, watch: &dyn Watch, path: &Path) -> Result<(u64, String), ImportError> {
    let failed = |error| file_error(path, error);
    let mut hasher = blake3::Hasher::new();
    let mut piece = vec![0; PIECE];
    let mut at = 0;
    loop {
        match image.read_at(&mut piece, at) {
            Ok(0) => break,
            Ok(got) => {
                hasher.update(&piece[..got]);
                at += got as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(failed(error)),
        }
        if watch.is_cancelled() {
            return Err(ImportError::Cancelled);
        }
    }
    match at {
        0 => Err(ImportError::Process(
            "the import process wrote no image".into(),
        )),
        size => Ok((size, hasher.finalize().to_hex().to_string())),
    }
}

/// The running process. It is killed and reaped when this is dropped.
struct Process {
    child: Child,
    channel: UnixStream,
}

impl Process {
    fn send(&mut self, request: &[u8]) -> Result<(), ImportError> {
        match self.channel.write_all(request) {
            // It has failed, and says why.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            Err(error) => Err(ImportError::Process(format!(
                "the import process takes no request: {error}"
            ))),
            Ok(()) => Ok(()),
        }
    }

    /// Waits for the answer.
    fn made(&mut self, watch: &dyn Watch) -> Result<Made, ImportError> {
        let begun = Instant::now();
        let mut reports = 0;
        loop {
            match self.answer(watch)? {
                Answer::Progress { done, total } => {
                    reports += 1;
                    if reports > MAX_REPORTS * (1 + begun.elapsed().as_secs()) {
                        let sentence = "the import process sends too many messages";
                        return Err(ImportError::Process(sentence.into()));
                    }
                    watch.moved(done.min(total), total);
                    check(Instant::now(), watch)?;
                }
                Answer::Made(made) => return Ok(made),
                Answer::Failed(failure) => {
                    let sentence = printable(&failure.sentence);
                    return Err(match failure.kind {
                        FailureKind::Source => ImportError::Source(sentence),
                        FailureKind::Full => ImportError::Full,
                        FailureKind::Process => ImportError::Process(sentence),
                    });
                }
            }
        }
    }

    fn answer(&mut self, watch: &dyn Watch) -> Result<Answer, ImportError> {
        let wrong = |error: MessageError| {
            ImportError::Process(format!("the import process can't be understood: {error}"))
        };
        let mut head = [0; 4];
        self.fill(&mut head, watch)?;
        let length = length(head).map_err(wrong)?;
        let mut bytes = Vec::new();
        while bytes.len() < length {
            let begin = bytes.len();
            bytes.resize(length.min(begin + STEP), 0);
            self.fill(&mut bytes[begin..], watch)?;
        }
        decode_answer(&bytes).map_err(wrong)
    }

    fn fill(&mut self, mut buffer: &mut [u8], watch: &dyn Watch) -> Result<(), ImportError> {
        let mut heard = Instant::now();
        while !buffer.is_empty() {
            match self.channel.read(buffer) {
                Ok(0) => return Err(self.ended()),
                Ok(got) => {
                    buffer = &mut buffer[got..];
                    heard = Instant::now();
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => check(heard, watch)?,
                    io::ErrorKind::Interrupted => {}
                    _ => return Err(self.ended()),
                },
            }
        }
        Ok(())
    }

    /// It has closed its channel without an answer.
    fn ended(&mut self) -> ImportError {
        let mut polled = [PollFd::new(&self.child, PollFlags::IN)];
        let ended = poll(&mut polled, Some(&END_TIME)).is_ok_and(|ready| ready > 0);
        let status = match ended {
            true => self.child.status().ok(),
            false => None,
        };
        let how = match status {
            None => "closed its channel".to_owned(),
            Some(status) => match status.signal() {
                // By the kernel, or where its own limit is reached.
                Some(signal @ (SIGABRT | SIGKILL)) => {
                    format!("was ended by signal {signal}, perhaps for lack of memory,")
                }
                Some(signal) => format!("was ended by signal {signal}"),
                None => format!("ended with status {}", status.code().unwrap_or_default()),
            },
        };
        ImportError::Process(format!(
            "the import process {how} before the image was complete"
        ))
    }
}

/// A text of the process without control characters.
fn printable(text: &str) -> String {
    let plain = |char: char| match char.is_control() {
        true => char::REPLACEMENT_CHARACTER,
        false => char,
    };
    text.chars().map(plain).collect()
}

#[cfg(test)]
mod tests;
