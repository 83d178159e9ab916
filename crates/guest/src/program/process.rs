//! A running program: its streams, input queue and exit status.
//!
//! Nothing here blocks. The owner polls the program's descriptors, passes readiness back, and
//! reports when the process was reaped.

use super::prepare::{Prepared, reason};
use crate::poll::{Channel, PollSet, Token};
use crate::syscalls;
use alloc::{collections::VecDeque, format, vec::Vec};
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicBool, Ordering};
use jiffy_wire::agent::{
    Command, ExecInput, ExitStatus, StartError, StartFailure, Stream, WindowSize,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, Result};
use rustix::process::Pid;
use rustix::pty::OpenptFlags;

/// Most bytes of input queued for a program that does not read. Beyond this the owner stops
/// accepting input.
pub const INPUT_LIMIT: usize = 256 * 1024;
/// After the program's exit, its streams count as complete once they were silent for this long,
/// even if another process (such as a daemon that it started) still has them open, nanoseconds.
pub const QUIET_AFTER_EXIT_NS: u64 = 100_000_000;

/// Pauses between checks of a terminal that no process has open, nanoseconds.
const FIRST_PAUSE_NS: u64 = 20_000_000;
const LONGEST_PAUSE_NS: u64 = 1_000_000_000;

/// A started program.
#[derive(Debug)]
pub struct Program {
    pid: Pid,
    terminal: bool,
    stdin: Option<OwnedFd>,
    input: VecDeque<u8>,
    input_ends: bool,
    stdout: Option<OwnedFd>,
    stderr: Option<OwnedFd>,
    exit: Option<ExitStatus>,
    /// When to check again whether a process has the terminal open, if none had it open although
    /// the program runs.
    recheck_terminal_at: Option<u64>,
    pause_ns: u64,
    /// Since when nothing was read although the streams were polled; `None` while they are not
    /// polled.
    quiet_since: Option<u64>,
}

/// Result of a read.
#[derive(Debug, PartialEq, Eq)]
pub enum Output<'a> {
    /// Data.
    Data(&'a [u8]),
    /// No data now.
    Nothing,
    /// The stream has ended.
    Closed,
}

/// Whether any program has run in this guest.
static STARTED: AtomicBool = AtomicBool::new(false);

/// Records that a program is about to run or to read files.
pub fn note_start() {
    STARTED.store(true, Ordering::Relaxed);
}

/// Whether any program was started. It may have read the boot id and passed it on.
pub fn any_was_started() -> bool {
    STARTED.load(Ordering::Relaxed)
}

/// Standard streams of the child, and this process's ends of them.
struct Streams {
    child: [OwnedFd; 3],
    stdin: Option<OwnedFd>,
    stdout: OwnedFd,
    stderr: Option<OwnedFd>,
}

impl Program {
    /// Starts the command.
    ///
    /// # Errors
    ///
    /// If [`Prepared::new`] refuses the command, its pipes or terminal can't be made, or a step of
    /// the start fails.
    pub fn start(command: &Command) -> core::result::Result<Program, StartError> {
        let prepared = Prepared::new(command)?;
        let streams = match command.tty {
            Some(size) => open_terminal(size, command.stdin, prepared.uid()),
            None => open_pipes(command.stdin, prepared.uid()),
        }
        .map_err(|errno| StartError {
            kind: StartFailure::Other,
            message: format!(
                "no streams could be created for {}: {}",
                command.argv[0],
                reason(errno)
            ),
        })?;
        let child = &streams.child;
        let plan = prepared.plan([child[0].as_fd(), child[1].as_fd(), child[2].as_fd()]);
        note_start();
        let pid = syscalls::spawn::spawn(&plan).map_err(|failure| prepared.explain(failure))?;
        Ok(Program {
            pid,
            terminal: command.tty.is_some(),
            stdin: streams.stdin,
            input: VecDeque::new(),
            input_ends: false,
            stdout: Some(streams.stdout),
            stderr: streams.stderr,
            exit: None,
            recheck_terminal_at: None,
            pause_ns: FIRST_PAUSE_NS,
            quiet_since: None,
        })
    }

    /// The process id, which is also the id of the process group and session.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Whether the process has been reaped.
    pub fn has_exited(&self) -> bool {
        self.exit.is_some()
    }

    /// Bytes of input that the program has not read yet.
    pub fn input_backlog(&self) -> usize {
        self.input.len()
    }

    /// Handles input from the host. A signal that can't be sent is ignored, as a shell ignores one
    /// to a job that has just ended.
    pub fn input(&mut self, input: ExecInput) {
        match input {
            ExecInput::Stdin(bytes) => {
                if self.stdin.is_some() && !self.input_ends {
                    self.input.extend(bytes);
                }
            }
            ExecInput::StdinClosed => {
                if self.terminal && self.stdin.is_some() && !self.input_ends {
                    const END_OF_TRANSMISSION: u8 = 4; // VEOF, what Ctrl-D types
                    self.input.push_back(END_OF_TRANSMISSION);
                }
                self.input_ends = true;
            }
            ExecInput::Signal(signal) => {
                let _ = self.signal(signal);
            }
            ExecInput::Resize(size) => self.resize(size),
        }
        self.write_input();
    }

    /// Sends a signal to the process group.
    ///
    /// # Errors
    ///
    /// `ESRCH` if it has exited or there is no such signal; otherwise that of `kill`.
    pub fn signal(&self, signal: i32) -> Result<()> {
        if self.has_exited() || !(1..=64).contains(&signal) {
            return Err(Errno::SRCH);
        }
        syscalls::kill_group(self.pid, signal)
    }

    /// Handles a lost connection: closes stdin and sends SIGHUP. A terminal is hung up; other
    /// outputs stay open.
    pub fn hang_up(&mut self) {
        const SIGHUP: i32 = 1;
        const SIGCONT: i32 = 18;
        self.stdin = None;
        self.input.clear();
        let _ = self.signal(SIGHUP);
        // A stopped program must be continued to handle the signal.
        let _ = self.signal(SIGCONT);
        if self.terminal {
            self.stdout = None;
        }
    }

    fn resize(&self, size: WindowSize) {
        if let (true, Some(master)) = (self.terminal, &self.stdout) {
            let _ = rustix::termios::tcsetwinsize(master, window(size));
        }
    }

    /// Adds descriptors to the poll set: outputs for which the owner has room, and standard
    /// input while input is queued.
    pub fn interest<'a>(
        &'a self,
        room: [bool; 2],
        token: impl Fn(Channel) -> Token,
        set: &mut PollSet<'a>,
    ) {
        if let (Some(fd), false) = (&self.stdin, self.input.is_empty()) {
            set.add(fd, PollFlags::OUT, token(Channel::Stdin));
        }
        let outputs = [
            (&self.stdout, Channel::Stdout),
            (&self.stderr, Channel::Stderr),
        ];
        for ((fd, channel), room) in outputs.into_iter().zip(room) {
            if let (Some(fd), true, None) = (fd, room, self.recheck_terminal_at) {
                set.add(fd, PollFlags::IN, token(channel));
            }
        }
    }

    /// Writes as much of the queued input as possible.
    pub fn write_input(&mut self) {
        let Some(fd) = &self.stdin else { return };
        while !self.input.is_empty() {
            match rustix::io::write(fd, self.input.as_slices().0) {
                Ok(count) => drop(self.input.drain(..count)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(_) => {
                    // No process reads any more.
                    self.stdin = None;
                    self.input.clear();
                    return;
                }
            }
        }
        if self.input_ends {
            self.stdin = None;
        }
    }

    /// Reads a stream that was reported ready.
    pub fn read<'a>(
        &mut self,
        stream: Stream,
        space: &'a mut [MaybeUninit<u8>],
        now: u64,
    ) -> Output<'a> {
        let end = match stream {
            Stream::Stdout => &mut self.stdout,
            Stream::Stderr => &mut self.stderr,
        };
        let Some(fd) = end else { return Output::Closed };
        match rustix::io::read(&*fd, space) {
            Ok((bytes, _)) if !bytes.is_empty() => {
                self.quiet_since = Some(now);
                return Output::Data(bytes);
            }
            Ok(_) => {}
            Err(Errno::AGAIN | Errno::INTR) => return Output::Nothing,
            // No process has the terminal open. The program may be about to exit (many close their
            // streams first) or may open it again. Closing this side now would send it SIGHUP.
            Err(Errno::IO) if self.terminal && self.exit.is_none() => {
                self.recheck_terminal_at = Some(now + self.pause_ns);
                self.pause_ns = (self.pause_ns * 2).min(LONGEST_PAUSE_NS);
                return Output::Nothing;
            }
            Err(_) => {}
        }
        *end = None;
        Output::Closed
    }

    /// Records that the process was reaped.
    pub fn reaped(&mut self, status: ExitStatus, now: u64) {
        self.exit = Some(status);
        self.recheck_terminal_at = None;
        self.quiet_since = Some(now);
        self.stdin = None;
        self.input.clear();
    }

    /// The exit status, once the output is complete. `room` is as in [`Self::interest`]; the time
    /// limit for silent outputs does not run for streams that are not polled.
    pub fn finished(&mut self, room: [bool; 2], now: u64) -> Option<ExitStatus> {
        if self
            .recheck_terminal_at
            .is_some_and(|look_again| now >= look_again)
        {
            self.recheck_terminal_at = None;
        }
        let exit = self.exit?;
        if self.stdout.is_none() && self.stderr.is_none() {
            return Some(exit);
        }
        let stuck = (self.stdout.is_some() && !room[0]) || (self.stderr.is_some() && !room[1]);
        if stuck {
            self.quiet_since = None;
            return None;
        }
        let since = *self.quiet_since.get_or_insert(now);
        if now.saturating_sub(since) < QUIET_AFTER_EXIT_NS {
            return None;
        }
        // The owner may not have polled since.
        if self.has_output() {
            self.quiet_since = Some(now);
            return None;
        }
        self.stdout = None;
        self.stderr = None;
        Some(exit)
    }

    fn has_output(&self) -> bool {
        let open = [&self.stdout, &self.stderr].into_iter().flatten();
        let mut open: Vec<_> = open.map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        let at_once = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        poll(&mut open, Some(&at_once)).is_ok()
            && open.iter().any(|it| it.revents().contains(PollFlags::IN))
    }

    /// When [`Self::finished`] should be called again, CLOCK_MONOTONIC nanoseconds.
    pub fn deadline(&self) -> Option<u64> {
        match self.exit {
            Some(_) => Some(self.quiet_since? + QUIET_AFTER_EXIT_NS),
            None => self.recheck_terminal_at,
        }
    }
}

fn open_pipes(with_stdin: bool, owner: Option<u32>) -> Result<Streams> {
    use rustix::pipe::{PipeFlags, pipe_with};
    let (child_stdin, stdin) = if with_stdin {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
        rustix::fs::fcntl_setfl(&write, OFlags::NONBLOCK)?;
        (read, Some(write))
    } else {
        (crate::files::open(c"/dev/null")?, None)
    };
    // This process's ends of the outputs may be blocking, because only it reads them, after poll
    // has found data.
    let (stdout, child_stdout) = pipe_with(PipeFlags::CLOEXEC)?;
    let (stderr, child_stderr) = pipe_with(PipeFlags::CLOEXEC)?;
    // Only a pipe's owner (and root) may reopen it as /dev/stderr.
    if let Some(uid) = owner.filter(|uid| *uid != 0) {
        let pipes = [&child_stdout, &child_stderr];
        for pipe in pipes.into_iter().chain(with_stdin.then_some(&child_stdin)) {
            rustix::fs::fchown(pipe, Some(rustix::fs::Uid::from_raw(uid)), None)?;
        }
    }
    Ok(Streams {
        child: [child_stdin, child_stdout, child_stderr],
        stdin,
        stdout,
        stderr: Some(stderr),
    })
}

fn open_terminal(size: WindowSize, with_stdin: bool, owner: Option<u32>) -> Result<Streams> {
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let master = rustix::fs::open(c"/dev/ptmx", flags, Mode::empty())?;
    rustix::pty::unlockpt(&master)?;
    rustix::termios::tcsetwinsize(&master, window(size))?;
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let slave = rustix::pty::ioctl_tiocgptpeer(&master, flags)?;
    if let Some(uid) = owner {
        rustix::fs::fchown(&slave, Some(rustix::fs::Uid::from_raw(uid)), None)?;
    }
    let stdin = with_stdin
        .then(|| rustix::io::fcntl_dupfd_cloexec(&master, 3))
        .transpose()?;
    let again = |fd: &OwnedFd| rustix::io::fcntl_dupfd_cloexec(fd, 3);
    let child = [again(&slave)?, again(&slave)?, slave];
    Ok(Streams {
        child,
        stdin,
        stdout: master,
        stderr: None,
    })
}

fn window(size: WindowSize) -> rustix::termios::Winsize {
    rustix::termios::Winsize {
        ws_row: size.rows,
        ws_col: size.columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    }
}

/// Converts a wait status; `None` for a stop or continuation.
pub fn exit_status(status: rustix::process::WaitStatus) -> Option<ExitStatus> {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => Some(ExitStatus::Code(code)),
        (None, Some(signal)) => Some(ExitStatus::Signal(signal)),
        (None, None) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::pipe::{PipeFlags, pipe_with};

    const END: ExitStatus = ExitStatus::Code(0);
    const QUIET: u64 = QUIET_AFTER_EXIT_NS;

    /// A program that has exited with 0, and a pipe that another process still has open.
    fn ended() -> (Program, OwnedFd) {
        let (stdout, held) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let mut program = Program {
            pid: rustix::process::getpid(),
            terminal: false,
            stdin: None,
            input: VecDeque::new(),
            input_ends: false,
            stdout: Some(stdout),
            stderr: None,
            exit: None,
            recheck_terminal_at: None,
            pause_ns: FIRST_PAUSE_NS,
            quiet_since: None,
        };
        program.reaped(END, 0);
        (program, held)
    }

    fn read(program: &mut Program, now: u64) -> usize {
        let mut space = [MaybeUninit::uninit(); 16];
        match program.read(Stream::Stdout, &mut space, now) {
            Output::Data(bytes) => bytes.len(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_silent_pipe_held_open_does_not_delay_the_exit_report() {
        let (mut program, _held) = ended();
        assert_eq!(program.finished([true; 2], 0), None);
        assert_eq!(program.finished([true; 2], QUIET - 1), None);
        assert_eq!(program.deadline(), Some(QUIET));
        assert_eq!(program.finished([true; 2], QUIET), Some(END));
    }

    #[test]
    fn output_left_in_the_pipe_is_read_for_a_slow_reader() {
        let (mut program, held) = ended();
        rustix::io::write(&held, b"rest").unwrap();
        assert_eq!(program.finished([false; 2], 0), None);
        // There is room again only from here on.
        assert_eq!(program.finished([true; 2], QUIET), None);
        assert_eq!(read(&mut program, QUIET), 4);
        assert_eq!(program.finished([true; 2], QUIET + 1), None);
        assert_eq!(program.finished([true; 2], 2 * QUIET + 1), Some(END));
    }

    #[test]
    fn output_left_in_the_pipe_is_read_after_a_late_poll() {
        let (mut program, held) = ended();
        assert_eq!(program.finished([true; 2], 0), None);
        rustix::io::write(&held, b"rest").unwrap();
        assert_eq!(program.finished([true; 2], 10 * QUIET), None);
        assert_eq!(read(&mut program, 10 * QUIET), 4);
    }

    #[test]
    fn time_without_polling_does_not_count_as_silence() {
        let (mut program, held) = ended();
        assert_eq!(program.finished([true; 2], 0), None);
        assert_eq!(program.finished([false; 2], QUIET / 2), None);
        assert_eq!(program.finished([false; 2], 9 * QUIET), None);
        // The time limit for silent outputs begins here.
        assert_eq!(program.finished([true; 2], 20 * QUIET), None);
        assert_eq!(program.finished([true; 2], 21 * QUIET - 1), None);
        rustix::io::write(&held, b"late").unwrap();
        assert_eq!(read(&mut program, 21 * QUIET - 1), 4);
    }
}
