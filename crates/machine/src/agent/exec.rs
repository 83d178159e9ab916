//! Runs one program with its streams.

use crate::protocol::{Receiver, send};
use jiffy_sys::mutex::lock;
use jiffy_wire::agent::{
    Command, ExecInput, ExecOutput, ExitStatus, StartError, StartFailure, Stream, WindowSize,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::termios::{Winsize, tcsetwinsize};
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How long after the program's end its children may add output. Output written before that is
/// always delivered.
const DRAIN: Duration = Duration::from_millis(500);
/// Most output kept with `keep_output`, bytes; the rest is dropped with a note.
const MOST_KEPT: usize = 64 * 1024 * 1024;

/// Runs `command` to its end, with `stream` for its input and output.
///
/// # Errors
///
/// If the connection is lost, or `pipe` or `wait` fails. If the program can't be started, the
/// client gets [`ExecOutput::Failed`].
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

    // The write end is closed when the program has ended.
    let (over, runs) = pipe_with(PipeFlags::CLOEXEC)?;
    let over = Arc::new(over);
    let copies: Vec<_> = started
        .outputs
        .into_iter()
        .map(|(which, source)| {
            let (output, over) = (output.clone(), Arc::clone(&over));
            std::thread::spawn(move || copy_out(which, source, &output, &over))
        })
        .collect();
    let group = Group {
        pid: child.id(),
        ended: Arc::default(),
    };
    let ended = Arc::clone(&group.ended);
    std::thread::spawn(move || forward_input(receiver, started.input, &group));

    let status = child.wait()?;
    ended.store(true, Ordering::SeqCst);
    drop(runs);
    for copy in copies {
        let _ = copy.join();
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
        lock(&self.0)
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

    /// Sends the output that was kept.
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

/// Copies all output of the program, and output that its children write within [`DRAIN`] after its
/// end, at which `over` hangs up.
fn copy_out(which: Stream, mut source: File, output: &Output, over: &OwnedFd) {
    let mut buffer = vec![0; jiffy_wire::frame::MAX_DATA];
    // After the end: bytes that were in the pipe then, and the deadline for later ones.
    let mut rest: Option<(u64, Instant)> = None;
    loop {
        match rest {
            None => {
                if !ready(&source, over) {
                    let there = rustix::io::ioctl_fionread(&source).unwrap_or(0);
                    rest = Some((there, Instant::now() + DRAIN));
                    continue;
                }
            }
            Some((0, until)) if !ready_until(&source, until) => return,
            Some(_) => {}
        }
        match source.read(&mut buffer) {
            // A terminal without users reads as EIO.
            Ok(0) | Err(_) => return,
            Ok(length) => {
                if let Some((there, _)) = &mut rest {
                    *there = there.saturating_sub(length as u64);
                }
                if output.data(which, &buffer[..length]).is_err() {
                    return;
                }
            }
        }
    }
}

/// Waits until `source` is readable; false if the program ends first.
fn ready(source: &File, over: &OwnedFd) -> bool {
    loop {
        let mut both = [
            PollFd::new(source, PollFlags::IN),
            PollFd::new(over, PollFlags::IN),
        ];
        match poll(&mut both, None) {
            Err(Errno::INTR) => {}
            Err(_) => return true,
            Ok(_) if !both[1].revents().is_empty() => return false,
            Ok(_) => return true,
        }
    }
}

/// Waits until `source` is readable or the time is over; false in the second case.
fn ready_until(source: &File, until: Instant) -> bool {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: left.subsec_nanos().into(),
        };
        match poll(&mut [PollFd::new(source, PollFlags::IN)], Some(&left)) {
            Err(Errno::INTR) => {}
            Ok(0) => return false,
            Ok(_) | Err(_) => return !(left.tv_sec == 0 && left.tv_nsec == 0),
        }
    }
}

enum Input {
    None,
    Pipe(ChildStdin),
    Terminal(File),
}

/// A program's process group. After the program's end it gets no signals, because its children may
/// be servers and its id may be reused.
struct Group {
    pid: u32,
    ended: Arc<AtomicBool>,
}

impl Group {
    fn signal(&self, signal: i32) {
        if !self.ended.load(Ordering::SeqCst) {
            signal_group(self.pid, signal);
        }
    }
}

/// Passes on input, signals and terminal sizes until the host disconnects.
fn forward_input(mut receiver: Receiver<TcpStream>, mut input: Input, group: &Group) {
    while let Ok(Some(message)) = receiver.receive::<ExecInput>() {
        match message {
            ExecInput::Stdin(data) => {
                let written = match &mut input {
                    Input::None => Ok(()),
                    Input::Pipe(pipe) => match write_while_there(pipe, &data, receiver.stream()) {
                        Ok(false) => break,
                        written => written.map(drop),
                    },
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
            ExecInput::Signal(signal) => group.signal(signal),
            ExecInput::Resize(size) => {
                if let Input::Terminal(terminal) = &input {
                    resize(terminal, size);
                }
            }
        }
    }
    // The host has disconnected, or the program has ended.
    group.signal(libc::SIGHUP);
}

/// Writes all of it into a pipe that does not block; false if the host disconnects while the pipe is
/// full. A program that does not read would otherwise outlive its client.
fn write_while_there(pipe: &mut ChildStdin, mut data: &[u8], host: &TcpStream) -> io::Result<bool> {
    while !data.is_empty() {
        match pipe.write(data) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => data = &data[written..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let mut both = [
                    PollFd::new(pipe, PollFlags::OUT),
                    PollFd::new(host, PollFlags::RDHUP),
                ];
                match poll(&mut both, None) {
                    Ok(_) if both[0].revents().is_empty() => return Ok(false),
                    Ok(_) | Err(Errno::INTR) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

#[allow(unsafe_code)]
fn signal_group(pid: u32, signal: i32) {
    // kill(2) with -1 would reach all processes.
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
    let input = match child.stdin.take() {
        None => Input::None,
        Some(pipe) => {
            // The program's end is an open file of its own and blocks as ever.
            rustix::io::ioctl_fionbio(&pipe, true)?;
            Input::Pipe(pipe)
        }
    };
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
    // Without NOCTTY it would become the controlling terminal of the agent, which is a session
    // leader, and the terminal's hangup would end the agent.
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
    // async-signal-safe and touch no memory of this process.
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// A shell without a terminal would also leave it running.
    #[test]
    fn background_processes_outlive_their_program() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let host = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let stream = listener.accept().unwrap().0;
        let script = "sleep 1000 >/dev/null 2>&1 & echo $!";
        let command = Command {
            argv: ["sh", "-c", script].map(String::from).to_vec(),
            ..Command::default()
        };
        let receiver = Receiver::new(stream.try_clone().unwrap());
        run(receiver, stream, &command, false).unwrap();
        let mut receiver = Receiver::new(host);
        let mut left = String::new();
        while let Some(message) = receiver.receive::<ExecOutput>().unwrap() {
            if let ExecOutput::Output { data, .. } = message {
                left.push_str(&String::from_utf8(data).unwrap());
            }
        }
        // The connection is closed; this gives the thread that reads it time to notice.
        std::thread::sleep(Duration::from_millis(300));
        let left = left.trim();
        let stat = std::fs::read_to_string(format!("/proc/{left}/stat")).unwrap_or_default();
        let pid = rustix::process::Pid::from_raw(left.parse().unwrap()).unwrap();
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        assert!(!stat.is_empty() && !stat.contains(") Z "), "{stat:?}");
    }

    /// A slow host gets all output written before the end, even after the time limit for later
    /// output.
    #[test]
    fn output_written_before_the_exit_is_delivered_after_it() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut host = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let output = Output::new(listener.accept().unwrap().0, false);
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let (over, runs) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let written = vec![b'x'; 65_536];
        File::from(writer.try_clone().unwrap())
            .write_all(&written)
            .unwrap();
        drop(runs);
        // A slow host still takes earlier output.
        let busy = output.lock();
        let copying = {
            let output = output.clone();
            std::thread::spawn(move || {
                copy_out(Stream::Stdout, File::from(reader), &output, &over);
                output.close().unwrap();
            })
        };
        std::thread::sleep(DRAIN * 2);
        drop(busy);
        let mut receiver = Receiver::new(host.try_clone().unwrap());
        let mut got = Vec::new();
        while let Some(message) = receiver.receive::<ExecOutput>().unwrap() {
            let ExecOutput::Output { data, .. } = message else {
                panic!("{message:?}")
            };
            got.extend(data);
        }
        copying.join().unwrap();
        assert!(got == written, "{} of {} bytes", got.len(), written.len());
        // A child may still have the pipe open.
        drop(writer);
        assert_eq!(host.read(&mut [0]).unwrap(), 0);
    }
}
