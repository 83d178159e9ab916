//! The command of `jiffy run`, `create` and `exec`, and how it is connected.

use crate::args::{CommandOptions, StdioOptions};
use crate::session::{self, Stdio};
use jiffy_wire::agent::{Command, WindowSize};

/// Size of a terminal that does not report one.
const DEFAULT_SIZE: WindowSize = WindowSize {
    rows: 24,
    columns: 80,
};

/// How a command is connected: to a terminal if there is one, and to stdin if that was requested or
/// is a pipe or a file.
pub fn stdio(options: &StdioOptions) -> Stdio {
    let detected = !options.no_tty && session::foreground_terminals();
    Stdio {
        stdin: options.interactive || detected || !session::on_terminal(),
        tty: options.tty || detected,
    }
}

/// The command for the guest.
pub fn command(argv: Vec<String>, options: CommandOptions, stdio: Stdio) -> Command {
    let mut env: Vec<String> = options.env.into_iter().filter_map(variable).collect();
    if stdio.tty
        && !env.iter().any(|entry| entry.starts_with("TERM="))
        && let Some(term) = variable("TERM".to_owned())
    {
        env.push(term);
    }
    Command {
        argv,
        env,
        cwd: options.workdir,
        user: options.user,
        tty: stdio.tty.then(|| session::size().unwrap_or(DEFAULT_SIZE)),
        stdin: stdio.stdin,
    }
}

/// `NAME=VALUE`, or this process's value of `NAME`; `None` if it is not set.
fn variable(entry: String) -> Option<String> {
    if entry.contains('=') {
        return Some(entry);
    }
    let value = std::env::var(&entry).ok()?;
    Some(format!("{entry}={value}"))
}
