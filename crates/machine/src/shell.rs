//! `jiffy machine shell`: a terminal in the machine.

use crate::client::{AgentAddress, Sender};
use crate::error::MachineError;
use jiffy_wire::agent::{Command, ExecInput, ExecOutput, ExitStatus, Stream, WindowSize};
use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcgetwinsize, tcsetattr};
use std::io::{self, Read, Write};
use std::time::Duration;

/// Runs `argv` (if empty, a shell) in the machine with this process's stdin, stdout and stderr.
/// Returns the exit status as a shell would show it.
///
/// # Errors
///
/// If the agent can't be reached, the program can't be started, or the connection is lost.
pub fn run(agent: &AgentAddress, argv: &[String]) -> Result<i32, MachineError> {
    let terminal = isatty(io::stdin()) && isatty(io::stdout());
    let argv = if argv.is_empty() {
        vec!["/bin/sh".into(), "-l".into()]
    } else {
        argv.to_vec()
    };
    let size = terminal.then(window_size).flatten();
    let command = Command {
        argv,
        tty: size,
        stdin: true,
        env: std::env::var("TERM")
            .map(|term| vec![format!("TERM={term}")])
            .unwrap_or_default(),
        ..Command::default()
    };
    let mut session = agent.exec(command, false)?;
    let raw = if size.is_some() { RawMode::set() } else { None };
    let sender = session.sender()?;
    std::thread::spawn(move || pass_input(sender));
    if let Some(size) = size {
        let sender = session.sender()?;
        std::thread::spawn(move || follow_size(sender, size));
    }
    let code = loop {
        match session.receive()? {
            Some(ExecOutput::Started { .. }) => {}
            Some(ExecOutput::Output { stream, data }) => {
                let written = match stream {
                    Stream::Stdout => write_all(io::stdout().lock(), &data),
                    Stream::Stderr => write_all(io::stderr().lock(), &data),
                };
                if written.is_err() {
                    break ExitStatus::Signal(libc::SIGPIPE).shell_code();
                }
            }
            Some(ExecOutput::Exited(status)) => break status.shell_code(),
            Some(ExecOutput::Failed(error)) => {
                drop(raw);
                return Err(MachineError::Program(error.message));
            }
            Some(_) => {}
            None => {
                let gone = io::Error::from(io::ErrorKind::UnexpectedEof);
                return Err(MachineError::Agent(gone));
            }
        }
    };
    Ok(code)
}

fn write_all(mut out: impl Write, data: &[u8]) -> io::Result<()> {
    out.write_all(data)?;
    out.flush()
}

fn pass_input(mut sender: Sender) {
    let mut buffer = [0; 4096];
    loop {
        let message = match io::stdin().lock().read(&mut buffer) {
            Ok(0) | Err(_) => ExecInput::StdinClosed,
            Ok(length) => ExecInput::Stdin(buffer[..length].to_vec()),
        };
        let end = message == ExecInput::StdinClosed;
        if sender.send(&message).is_err() || end {
            return;
        }
    }
}

/// Polls the terminal's size five times a second. SIGWINCH is left to the program that uses this
/// library.
fn follow_size(mut sender: Sender, mut size: WindowSize) {
    loop {
        std::thread::sleep(Duration::from_millis(200));
        if let Some(now) = window_size()
            && now != size
        {
            size = now;
            if sender.send(&ExecInput::Resize(now)).is_err() {
                return;
            }
        }
    }
}

fn window_size() -> Option<WindowSize> {
    let size = tcgetwinsize(io::stdout()).ok()?;
    Some(WindowSize {
        rows: size.ws_row,
        columns: size.ws_col,
    })
}

/// Raw mode of the terminal; dropping it restores the previous mode.
struct RawMode(Termios);

impl RawMode {
    fn set() -> Option<RawMode> {
        let before = tcgetattr(io::stdin()).ok()?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(io::stdin(), OptionalActions::Now, &raw).ok()?;
        Some(RawMode(before))
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.0);
    }
}
