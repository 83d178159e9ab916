//! Runs programs in the laboratory.

use super::{Lab, threads};
use anyhow::{Context, Result, bail, ensure};
use jiffy_machine::client::{AgentAddress, Sender, Session};
use jiffy_wire::agent::{Command, ExecInput, ExecOutput, ExitStatus, Stream, WindowSize};
use jiffy_wire::frame::MAX_DATA;
use std::time::{Duration, Instant};

/// Default time limit of a program.
const TIME_LIMIT: Duration = Duration::from_secs(600);

/// A program to run, with its options.
#[derive(Debug)]
pub struct Run<'a> {
    lab: &'a Lab,
    command: Command,
    stdin: Option<Vec<u8>>,
    keep_output: bool,
    time_limit: Duration,
}

/// Result of a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// How the program ended.
    pub status: ExitStatus,
    /// Its stdout.
    pub stdout: Vec<u8>,
    /// Its stderr.
    pub stderr: Vec<u8>,
}

impl Output {
    /// Its exit status as a shell shows it.
    pub fn code(&self) -> i32 {
        self.status.shell_code()
    }

    /// Its stdout as text, without white space at the end.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).trim_end().into()
    }

    /// Its stderr as text, without white space at the end.
    pub fn error_text(&self) -> String {
        String::from_utf8_lossy(&self.stderr).trim_end().into()
    }

    /// Returns itself if the program succeeded.
    ///
    /// # Errors
    ///
    /// If the exit status is not 0. The error contains stdout and stderr.
    pub fn success(self) -> Result<Output> {
        ensure!(
            self.status == ExitStatus::Code(0),
            "it ended with {:?}\nstdout: {}\nstderr: {}",
            self.status,
            self.text(),
            self.error_text()
        );
        Ok(self)
    }
}

impl<'a> Run<'a> {
    pub(crate) fn new(lab: &'a Lab, argv: Vec<String>) -> Run<'a> {
        Run {
            lab,
            command: Command {
                argv,
                ..Command::default()
            },
            stdin: None,
            keep_output: false,
            time_limit: TIME_LIMIT,
        }
    }

    /// Adds `NAME=value` to the program's environment.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.command.env.push(format!("{name}={value}"));
        self
    }

    /// Sets the working directory.
    pub fn cwd(mut self, path: &str) -> Self {
        self.command.cwd = Some(path.into());
        self
    }

    /// Sets the whole input.
    pub fn stdin(mut self, bytes: impl Into<Vec<u8>>) -> Self {
        self.stdin = Some(bytes.into());
        self.command.stdin = true;
        self
    }

    /// Keeps stdin open for [`Running::write`].
    pub fn open_stdin(mut self) -> Self {
        self.command.stdin = true;
        self
    }

    /// Runs the program on a terminal.
    pub fn tty(mut self, rows: u16, columns: u16) -> Self {
        self.command.tty = Some(WindowSize { rows, columns });
        self.command.stdin = true;
        self
    }

    /// Sends the output only after the program's end, for measurements.
    pub fn keep_output(mut self) -> Self {
        self.keep_output = true;
        self
    }

    /// Sets the time limit.
    pub fn time_limit(mut self, limit: Duration) -> Self {
        self.time_limit = limit;
        self
    }

    /// Starts the program.
    ///
    /// # Errors
    ///
    /// If the program can't be started, or the agent does not answer within 600 s.
    pub fn start(self) -> Result<Running> {
        let what = self.command.argv.join(" ");
        let mut session = self.lab.agent().exec(self.command, self.keep_output)?;
        // The program's own limit begins with its start.
        session.set_time_limit(Some(TIME_LIMIT))?;
        match session.receive()? {
            Some(ExecOutput::Started { .. }) => {}
            Some(ExecOutput::Failed(error)) => bail!("{}", error.message),
            other => bail!("{what}: the agent answered {other:?}"),
        }
        let mut sender = session.sender()?;
        if let Some(bytes) = self.stdin {
            // On a separate thread, because the program may answer before it has read everything.
            std::thread::spawn(move || {
                for piece in bytes.chunks(MAX_DATA) {
                    if sender.send(&ExecInput::Stdin(piece.to_vec())).is_err() {
                        return;
                    }
                }
                let _ = sender.send(&ExecInput::StdinClosed);
            });
        }
        Ok(Running {
            agent: self.lab.agent().clone(),
            sender: session.sender()?,
            session,
            what,
            deadline: Instant::now() + self.time_limit,
            stdout: Vec::new(),
            stderr: Vec::new(),
        })
    }

    /// Runs the program to its end.
    ///
    /// # Errors
    ///
    /// If it can't be started, exceeds its time limit, or the connection to the machine is lost.
    /// Its exit status is in the [`Output`].
    pub fn output(self) -> Result<Output> {
        self.start()?.wait()
    }
}

/// A running program. It gets SIGHUP when this is dropped.
#[derive(Debug)]
pub struct Running {
    agent: AgentAddress,
    session: Session,
    sender: Sender,
    what: String,
    deadline: Instant,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
}

impl Running {
    /// Writes to the program's stdin.
    ///
    /// # Errors
    ///
    /// If the connection to the machine is lost.
    pub fn write(&mut self, bytes: impl Into<Vec<u8>>) -> Result<()> {
        Ok(self.sender.send(&ExecInput::Stdin(bytes.into()))?)
    }

    /// Closes the program's stdin.
    ///
    /// # Errors
    ///
    /// If the connection to the machine is lost.
    pub fn close_stdin(&mut self) -> Result<()> {
        Ok(self.sender.send(&ExecInput::StdinClosed)?)
    }

    /// Sends a signal to the program's process group.
    ///
    /// # Errors
    ///
    /// If the connection to the machine is lost.
    pub fn signal(&mut self, signal: i32) -> Result<()> {
        Ok(self.sender.send(&ExecInput::Signal(signal))?)
    }

    /// Changes the size of the program's terminal.
    ///
    /// # Errors
    ///
    /// If the connection to the machine is lost.
    pub fn resize(&mut self, rows: u16, columns: u16) -> Result<()> {
        Ok(self
            .sender
            .send(&ExecInput::Resize(WindowSize { rows, columns }))?)
    }

    /// Waits until the program's stdout contains `text`; returns all stdout so far.
    ///
    /// # Errors
    ///
    /// If the program ends before, exceeds its time limit, or the connection to the machine is
    /// lost.
    pub fn read_until(&mut self, text: &str) -> Result<String> {
        loop {
            let so_far = String::from_utf8_lossy(&self.stdout).into_owned();
            if so_far.contains(text) {
                return Ok(so_far);
            }
            if let Some(status) = self.step()? {
                bail!(
                    "{}: ended with {status:?} before it wrote {text:?}\nstdout: {so_far}\nstderr: {}",
                    self.what,
                    String::from_utf8_lossy(&self.stderr)
                );
            }
        }
    }

    /// Waits until the program ends.
    ///
    /// # Errors
    ///
    /// If it exceeds its time limit, or the connection to the machine is lost. Its exit status is
    /// in the [`Output`].
    pub fn wait(mut self) -> Result<Output> {
        loop {
            if let Some(status) = self.step()? {
                return Ok(Output {
                    status,
                    stdout: std::mem::take(&mut self.stdout),
                    stderr: std::mem::take(&mut self.stderr),
                });
            }
        }
    }

    /// Calls `on_output` with each piece of output until the program ends.
    ///
    /// # Errors
    ///
    /// If it exceeds its time limit, or the connection to the machine is lost.
    pub fn relay(mut self, mut on_output: impl FnMut(Stream, &[u8])) -> Result<ExitStatus> {
        loop {
            let (out, error) = (self.stdout.len(), self.stderr.len());
            let status = self.step()?;
            if self.stdout.len() > out {
                on_output(Stream::Stdout, &self.stdout[out..]);
            }
            if self.stderr.len() > error {
                on_output(Stream::Stderr, &self.stderr[error..]);
            }
            if let Some(status) = status {
                return Ok(status);
            }
        }
    }

    fn step(&mut self) -> Result<Option<ExitStatus>> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        ensure!(!left.is_zero(), self.too_slow());
        self.session.set_time_limit(Some(left))?;
        let message = match self.session.receive() {
            Ok(message) => message,
            Err(_) if Instant::now() >= self.deadline => bail!(self.too_slow()),
            Err(error) => return Err(error).with_context(|| self.what.clone()),
        };
        match message {
            Some(ExecOutput::Output { stream, data }) => {
                match stream {
                    Stream::Stdout => self.stdout.extend(data),
                    Stream::Stderr => self.stderr.extend(data),
                }
                Ok(None)
            }
            Some(ExecOutput::Exited(status)) => Ok(Some(status)),
            Some(ExecOutput::Failed(error)) => bail!("{}", error.message),
            Some(_) => Ok(None),
            None => bail!("{}: the machine closed the connection", self.what),
        }
    }

    fn too_slow(&self) -> String {
        format!(
            "{}: did not end in time\nstdout: {}\nstderr: {}\nthreads in the machine: {}",
            self.what,
            String::from_utf8_lossy(&self.stdout),
            String::from_utf8_lossy(&self.stderr),
            threads::list(&self.agent)
        )
    }
}
