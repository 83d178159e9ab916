//! Programs, which run on the host.

use jiffy_wire::agent::{Command, ExecInput, ExitStatus, StartError, StartFailure};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, waitid};
use std::io::{self, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::{Arc, Mutex};

pub fn start(command: &Command) -> Result<Child, StartError> {
    let mut process = crate::jailed::command(&command.argv);
    process
        .envs(command.env.iter().filter_map(|entry| entry.split_once('=')))
        .current_dir(command.cwd.as_deref().unwrap_or("/"))
        .stdin(match command.stdin {
            true => Stdio::piped(),
            // Which is /dev/null: a jail has none to open.
            false => Stdio::inherit(),
        })
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    process.spawn().map_err(|error| StartError {
        kind: match error.kind() {
            io::ErrorKind::NotFound => StartFailure::NotFound,
            io::ErrorKind::PermissionDenied => StartFailure::NotExecutable,
            _ => StartFailure::Other,
        },
        message: format!("{} can't be started: {error}", command.argv[0]),
    })
}

pub fn feed(input: ExecInput, program: &Program, stdin: &mut Option<ChildStdin>) {
    match input {
        ExecInput::Stdin(bytes) => {
            if let Some(to) = stdin
                && to.write_all(&bytes).is_err()
            {
                *stdin = None;
            }
        }
        ExecInput::StdinClosed => *stdin = None,
        ExecInput::Signal(signal) => {
            if let Some(signal) = Signal::from_named_raw(signal) {
                program.signal(signal);
            }
        }
        ExecInput::Resize(_) => {}
    }
}

/// A program's process group. It is signalled only before its leader is reaped: afterwards the
/// number may be reused.
#[derive(Debug)]
pub struct Program {
    pub pid: u32,
    pub reaped: Mutex<bool>,
}

impl Program {
    pub fn of(child: &Child) -> Arc<Program> {
        Arc::new(Program {
            pid: child.id(),
            reaped: Mutex::new(false),
        })
    }

    pub fn signal(&self, signal: Signal) {
        let reaped = self.reaped.lock().unwrap();
        if !*reaped {
            let pid = Pid::from_raw(self.pid as i32).unwrap();
            let _ = rustix::process::kill_process_group(pid, signal);
        }
    }

    pub fn wait(&self, child: &mut Child) -> ExitStatus {
        let pid = Pid::from_raw(self.pid as i32).unwrap();
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        while waitid(WaitId::Pid(pid), options).is_err() {}
        let mut reaped = self.reaped.lock().unwrap();
        *reaped = true;
        status(child.wait().unwrap())
    }
}

pub fn status(status: std::process::ExitStatus) -> ExitStatus {
    match status.signal() {
        Some(signal) => ExitStatus::Signal(signal),
        None => ExitStatus::Code(status.code().unwrap_or(0)),
    }
}
