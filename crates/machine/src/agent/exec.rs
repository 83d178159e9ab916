//! One program with its streams.

use crate::protocol::{Receiver, send};
use jiffy_wire::agent::{
    Command, ExecInput, ExecOutput, ExitStatus, StartError, StartFailure, Stream, WindowSize,
};
use rustix::fs::{Mode, OFlags};
use rustix::termios::{Winsize, tcsetwinsize};
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

/// After the program's end, how long its children may keep its output open.
const DRAIN: Duration = Duration::from_millis(500);
/// Most output kept with `keep_output`, bytes; the rest is lost with a remark.
const MOST_KEPT: usize = 64 * 1024 * 1024;

/// Runs `command` with `stream` for its input and output, to its end.
pub fn run(
    receiver: Receiver<TcpStream>,
    stream: TcpStream,
    command: &Command,
    keep_output: bool,
) -> io::Result<()> {
    let output = Output::new(stream, keep_output);
    let started = match start(command) {
        Ok(started) => started,
        Err(error) => return output.send(&ExecOutput::Failed(error)),
    };
    let mut child = started.child;
    output.send(&ExecOutput::Started { pid: child.id() })?;

    let (drained, all_drained) = mpsc::channel();
    let mut streams = 0;
    for (which, source) in started.outputs {
        let output = output.clone();
        let drained = drained.clone();
        streams += 1;
        std::thread::spawn(move || {
            copy_out(which, source, &output);
            let _ = drained.send(());
        });
    }
    let pid = child.id();
    std::thread::spawn(move || feed(receiver, started.input, pid));

    let status = child.wait()?;
    for _ in 0..streams {
        if all_drained.recv_timeout(DRAIN).is_err() {
            break;
        }
    }
    output.flush()?;
    output.send(&ExecOutput::Exited(match status.signal() {
        Some(signal) => ExitStatus::Signal(signal),
        None => ExitStatus::Code(status.code().unwrap_or(0)),
    }))?;
    output.close()
}

/// The connection, shared by the threads that write to it.
#[derive(Clone)]
struct Output(Arc<Mutex<Sink>>);

struct Sink {
    stream: TcpStream,
    kept: Option<Vec<(Stream, Vec<u8>)>>,
    kept_bytes: usize,
}

impl Output {
    fn new(stream: TcpStream, keep: bool) -> Output {
        Output(Arc::new(Mutex::new(Sink {
            stream,
            kept: keep.then(Vec::new),
            kept_bytes: 0,
        })))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Sink> {
        self.0
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn send(&self, message: &ExecOutput) -> io::Result<()> {
        send(&mut self.lock().stream, message)
    }

    fn data(&self, stream: Stream, data: &[u8]) -> io::Result<()> {
        let mut sink = self.lock();
        let sink = &mut *sink;
        if let Some(kept) = &mut sink.kept {
            if sink.kept_bytes + data.len() <= MOST_KEPT {
                sink.kept_bytes += data.len();
                kept.push((stream, data.to_vec()));
            }
            return Ok(());
        }
        let data = data.to_vec();
        send(&mut sink.stream, &ExecOutput::Output { stream, data })
    }

    /// Sends what was kept.
    fn flush(&self) -> io::Result<()> {
        let mut sink = self.lock();
        for (stream, data) in sink.kept.take().unwrap_or_default() {
            send(&mut sink.stream, &ExecOutput::Output { stream, data })?;
        }
        Ok(())
    }

    fn close(&self) -> io::Result<()> {
        self.lock().stream.shutdown(std::net::Shutdown::Both)
    }
}

fn copy_out(which: Stream, mut source: File, output: &Output) {
    let mut buffer = vec![0; jiffy_wire::frame::MAX_DATA];
    loop {
        match source.read(&mut buffer) {
            // A terminal whose last user is gone reads as EIO.
            Ok(0) | Err(_) => return,
            Ok(length) => {
                if output.data(which, &buffer[..length]).is_err() {
                    return;
                }
            }
        }
    }
}

enum Input {
    None,
    Pipe(ChildStdin),
    Terminal(File),
}

/// Passes input, signals and sizes on until the host goes away.
fn feed(mut receiver: Receiver<TcpStream>, mut input: Input, pid: u32) {
    while let Ok(Some(message)) = receiver.receive::<ExecInput>() {
        match message {
            ExecInput::Stdin(data) => {
                let written = match &mut input {
                    Input::None => Ok(()),
                    Input::Pipe(pipe) => pipe.write_all(&data),
                    Input::Terminal(terminal) => terminal.write_all(&data),
                };
                if written.is_err() {
                    input = Input::None;
                }
            }
            ExecInput::StdinClosed => match &mut input {
                // End of file on a terminal is a character.
                Input::Terminal(terminal) => {
                    let _ = terminal.write_all(&[4]);
                }
                _ => input = Input::None,
            },
            ExecInput::Signal(signal) => signal_group(pid, signal),
            ExecInput::Resize(size) => {
                if let Input::Terminal(terminal) = &input {
                    resize(terminal, size);
                }
            }
        }
    }
    // The host is gone, or the program has ended and this changes nothing.
    signal_group(pid, libc::SIGHUP);
}

#[allow(unsafe_code)]
fn signal_group(pid: u32, signal: i32) {
    // To kill(2), -1 would be everybody.
    let Some(pid) = i32::try_from(pid).ok().filter(|pid| *pid > 1) else {
        return;
    };
    // SAFETY: kill touches no memory. Each program leads a group of its own.
    unsafe {
        libc::kill(-pid, signal);
    }
}

fn resize(terminal: impl AsFd, size: WindowSize) {
    let _ = tcsetwinsize(
        terminal,
        Winsize {
            ws_row: size.rows,
            ws_col: size.columns,
            ws_xpixel: 0,
            ws_ypixel: 0,
        },
    );
}

struct Started {
    child: Child,
    input: Input,
    outputs: Vec<(Stream, File)>,
}

fn start(command: &Command) -> Result<Started, StartError> {
    let invalid = |message: &str| StartError {
        kind: StartFailure::Invalid,
        message: message.into(),
    };
    let (program, arguments) = command
        .argv
        .split_first()
        .ok_or_else(|| invalid("there is no program to run"))?;
    if command.user.is_some() {
        return Err(invalid("programs in the machine run as root"));
    }
    let mut process = std::process::Command::new(program);
    process
        .args(arguments)
        .env_clear()
        .env("PATH", "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin")
        .env("HOME", "/root")
        .current_dir(command.cwd.as_deref().unwrap_or("/"));
    for pair in &command.env {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        process.env(name, value);
    }
    let failed = |error: &io::Error| StartError {
        kind: match error.kind() {
            io::ErrorKind::NotFound => StartFailure::NotFound,
            io::ErrorKind::PermissionDenied => StartFailure::NotExecutable,
            _ => StartFailure::Other,
        },
        message: format!("{program} can't be run in the machine: {error}"),
    };
    match command.tty {
        Some(size) => on_terminal(process, size).map_err(|error| failed(&error)),
        None => on_pipes(process, command.stdin).map_err(|error| failed(&error)),
    }
}

fn on_pipes(mut process: std::process::Command, stdin: bool) -> io::Result<Started> {
    let mut child = process
        .process_group(0)
        .stdin(if stdin { Stdio::piped() } else { Stdio::null() })
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut outputs = Vec::new();
    if let Some(stdout) = child.stdout.take() {
        outputs.push((Stream::Stdout, File::from(OwnedFd::from(stdout))));
    }
    if let Some(stderr) = child.stderr.take() {
        outputs.push((Stream::Stderr, File::from(OwnedFd::from(stderr))));
    }
    let input = child.stdin.take().map_or(Input::None, Input::Pipe);
    Ok(Started {
        child,
        input,
        outputs,
    })
}

#[allow(unsafe_code)]
fn on_terminal(mut process: std::process::Command, size: WindowSize) -> io::Result<Started> {
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
    grantpt(&master)?;
    unlockpt(&master)?;
    resize(&master, size);
    let name = ptsname(&master, Vec::new())?;
    // Without NOCTTY the terminal would become that of the agent itself, which
    // leads a session, and the terminal's end would be the agent's.
    let open = || {
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        rustix::fs::open(name.as_c_str(), flags, Mode::empty())
    };
    process
        .env("TERM", "xterm-256color")
        .stdin(open()?)
        .stdout(open()?)
        .stderr(open()?);
    // SAFETY: between fork and exec only setsid and ioctl are called; both are
    // async-signal-safe and touch no memory of ours.
    unsafe {
        process.pre_exec(|| {
            if libc::setsid() < 0 || libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(())
        });
    }
    let child = process.spawn()?;
    drop(process);
    let master = File::from(master);
    let input = Input::Terminal(master.try_clone()?);
    Ok(Started {
        child,
        input,
        outputs: vec![(Stream::Stdout, master)],
    })
}
