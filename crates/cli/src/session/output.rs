//! Writes a command's output to stdout and stderr.

use super::capture::Captured;
use super::fd::Waited;
use crate::client::FrameReader;
use crate::failure::{Failure, Kind, Result};
use jiffy_wire::agent::{ExecOutput, ExitStatus, StartError, Stream};
use std::io;
use tokio::sync::Notify;

/// The last message of a session.
pub enum Answer {
    /// The command ended.
    Exited(ExitStatus),
    /// It could not be started.
    NotStarted(StartError),
    /// The VM ended first.
    VmLost {
        message: String,
        hint: Option<String>,
    },
}

/// The output side of a session.
pub struct Output<'a> {
    frames: FrameReader,
    capture: Option<&'a mut Captured>,
    stdout: Sink,
    stderr: Sink,
    reader_gone: &'a Notify,
}

impl<'a> Output<'a> {
    /// `reader_gone` is notified when the reader of stdout has closed it.
    pub fn new(
        frames: FrameReader,
        capture: Option<&'a mut Captured>,
        reader_gone: &'a Notify,
    ) -> Output<'a> {
        Output {
            frames,
            capture,
            stdout: Sink::new(rustix::stdio::stdout()),
            stderr: Sink::new(rustix::stdio::stderr()),
            reader_gone,
        }
    }

    /// Delivers all output until the command has ended.
    ///
    /// # Errors
    ///
    /// If the connection is lost, or stdout or stderr can't be written.
    pub async fn deliver(&mut self) -> Result<Answer> {
        loop {
            match self.frames.next::<ExecOutput>().await? {
                Some(ExecOutput::Started { .. }) => {}
                Some(ExecOutput::Output { stream, data }) => self.write(stream, &data).await?,
                Some(ExecOutput::Exited(status)) => return Ok(Answer::Exited(status)),
                Some(ExecOutput::Failed(error)) => return Ok(Answer::NotStarted(error)),
                Some(ExecOutput::Lost { message, hint }) => {
                    return Ok(Answer::VmLost { message, hint });
                }
                None => {
                    return Err(Failure::new(
                        "the connection to jiffyd was lost while the command ran",
                    )
                    .kind(Kind::Unreachable));
                }
            }
        }
    }

    async fn write(&mut self, stream: Stream, data: &[u8]) -> Result<()> {
        if let Some(capture) = &mut self.capture {
            capture.push(stream, data);
            return Ok(());
        }
        let (sink, name) = match stream {
            Stream::Stdout => (&mut self.stdout, "stdout"),
            Stream::Stderr => (&mut self.stderr, "stderr"),
        };
        match sink.write(data).await {
            Ok(Written::All) => Ok(()),
            Ok(Written::ReaderGone) => {
                self.reader_gone.notify_one();
                Ok(())
            }
            Err(error) => Err(Failure::io(format_args!("{name} can't be written"), error)),
        }
    }
}

/// stdout or stderr, until its reader has closed it.
struct Sink {
    fd: Waited,
    gone: bool,
}

enum Written {
    All,
    /// The reader has closed it; returned once.
    ReaderGone,
}

impl Sink {
    fn new(fd: std::os::fd::BorrowedFd<'static>) -> Sink {
        Sink {
            fd: Waited::new(fd),
            gone: false,
        }
    }

    async fn write(&mut self, data: &[u8]) -> io::Result<Written> {
        if self.gone {
            return Ok(Written::All);
        }
        match self.fd.write_all(data).await {
            Ok(()) => Ok(Written::All),
            Err(error) if is_broken_pipe(&error) => {
                self.gone = true;
                Ok(Written::ReaderGone)
            }
            Err(error) => Err(error),
        }
    }
}

/// Whether the error means that a pipe's reader has closed it, or that the terminal was closed.
fn is_broken_pipe(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::BrokenPipe
        || error.raw_os_error() == Some(rustix::io::Errno::IO.raw_os_error())
}
