//! Converts a command to execve's arguments, and errors to sentences.

use super::user::{self, MAX_DATABASE, Unknown, User};
use crate::files;
use crate::syscalls::spawn::{Failure, Ids, Plan, Step, Strings};
use alloc::{
    ffi::CString,
    format,
    string::{String, ToString},
    vec::Vec,
};

use jiffy_wire::agent::{Command, StartError, StartFailure};
use rustix::fd::BorrowedFd;
use rustix::io::Errno;

/// PATH of a command that does not set it.
pub const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A command that can be started any number of times.
#[derive(Debug)]
pub struct Prepared {
    program: String,
    candidates: Vec<CString>,
    argv: Strings,
    envp: Strings,
    cwd: CString,
    ids: Option<Ids>,
    terminal: bool,
}

impl Prepared {
    /// Checks the command and looks up its user.
    ///
    /// # Errors
    ///
    /// If the command names no program, its user or group does not exist, or a text has a NUL byte.
    pub fn new(command: &Command) -> Result<Prepared, StartError> {
        let program = match command.argv.first() {
            Some(program) if !program.is_empty() => program.clone(),
            _ => return Err(invalid("the command is empty: give a program to run")),
        };
        let user = match command.user.as_deref() {
            // Most commands name no user; then no file is read.
            None | Some("") => None,
            Some(wanted) => Some(look_up(wanted)?),
        };
        let environment = environment(command, user.as_ref());
        let path = environment
            .iter()
            .find_map(|entry| entry.strip_prefix("PATH="))
            .unwrap_or(DEFAULT_PATH);
        let cwd = command
            .cwd
            .as_deref()
            .filter(|cwd| !cwd.is_empty())
            .unwrap_or("/");
        Ok(Prepared {
            candidates: c_strings(&candidates(&program, path))?,
            argv: Strings::new(c_strings(&command.argv)?),
            envp: Strings::new(c_strings(&environment)?),
            cwd: c_string(cwd)?,
            ids: user.map(|user| user.ids),
            terminal: command.tty.is_some(),
            program,
        })
    }

    /// The plan for a spawn with these standard descriptors.
    pub fn plan<'a>(&'a self, stdio: [BorrowedFd<'a>; 3]) -> Plan<'a> {
        Plan {
            candidates: &self.candidates,
            argv: &self.argv,
            envp: &self.envp,
            stdio,
            terminal: self.terminal,
            cwd: &self.cwd,
            ids: self.ids.as_ref(),
        }
    }

    /// The uid of the program, if it differs from this process's.
    pub fn uid(&self) -> Option<u32> {
        self.ids.as_ref().map(|ids| ids.uid)
    }

    /// Converts a failed spawn to an error for the user.
    pub fn explain(&self, failure: Failure) -> StartError {
        let program = &self.program;
        let cwd = self.cwd.to_string_lossy();
        let (kind, message) = match (failure.step, failure.errno) {
            (Step::Chdir, Errno::NOENT | Errno::NOTDIR) => (
                StartFailure::NoSuchDirectory,
                format!("the working directory {cwd} does not exist"),
            ),
            (Step::Chdir, errno) => (
                StartFailure::Other,
                format!(
                    "the working directory {cwd} cannot be entered: {}",
                    reason(errno)
                ),
            ),
            (Step::Exec, Errno::NOENT | Errno::NOTDIR) => {
                (StartFailure::NotFound, self.not_found())
            }
            (Step::Exec, Errno::ACCESS | Errno::ISDIR) => (
                StartFailure::NotExecutable,
                format!("{program} is not executable"),
            ),
            (Step::Exec, Errno::NOEXEC) => (
                StartFailure::NotExecutable,
                format!(
                    "{program} is not executable: neither a program for this processor nor a script that begins with #!"
                ),
            ),
            (Step::Exec, errno) => (
                StartFailure::Other,
                format!("{program} cannot be executed: {}", reason(errno)),
            ),
            (Step::Identity, errno) => (
                StartFailure::Other,
                format!("the user cannot be set: {}", reason(errno)),
            ),
            (Step::Fork, errno) => (
                StartFailure::Other,
                format!(
                    "no process could be created for {program}: {}",
                    reason(errno)
                ),
            ),
            (Step::Prepare, errno) => (
                StartFailure::Other,
                format!("{program} cannot be started: {}", reason(errno)),
            ),
        };
        StartError { kind, message }
    }

    fn not_found(&self) -> String {
        let program = &self.program;
        if !program.contains('/') {
            return format!("{program} was not found in PATH");
        }
        let there = self
            .candidates
            .first()
            .is_some_and(|path| files::exists(path.as_c_str()));
        if there {
            format!("{program} names an interpreter or loader that is not in the image")
        } else {
            format!("{program} does not exist")
        }
    }
}

/// Paths to try for a program: its name if that has a slash, else its name in each folder of `path`
/// (an empty folder is the working directory).
pub fn candidates(program: &str, path: &str) -> Vec<String> {
    if program.contains('/') {
        return [program.to_string()].into();
    }
    path.split(':')
        .map(|folder| match folder {
            "" => format!("./{program}"),
            folder => format!("{}/{program}", folder.trim_end_matches('/')),
        })
        .collect()
}

/// The command's environment, with defaults for missing variables.
fn environment(command: &Command, user: Option<&User>) -> Vec<String> {
    let lacks = |name: &str| {
        !command.env.iter().any(|entry| {
            entry
                .strip_prefix(name)
                .is_some_and(|rest| rest.starts_with('='))
        })
    };
    let mut environment = Vec::with_capacity(command.env.len() + 3);
    if lacks("PATH") {
        environment.push(format!("PATH={DEFAULT_PATH}"));
    }
    if lacks("HOME") {
        let home = user.map_or("/root", |user| user.home.as_str());
        environment.push(format!("HOME={home}"));
    }
    if lacks("TERM") && command.tty.is_some() {
        environment.push("TERM=xterm".into());
    }
    environment.extend(command.env.iter().cloned());
    environment
}

fn look_up(wanted: &str) -> Result<User, StartError> {
    let passwd = files::read_text("/etc/passwd", MAX_DATABASE).unwrap_or_default();
    let group = files::read_text("/etc/group", MAX_DATABASE).unwrap_or_default();
    user::find(wanted, &passwd, &group).map_err(|unknown| StartError {
        kind: StartFailure::NoSuchUser,
        message: match unknown {
            Unknown::User(name) => format!("the image has no user {name:?} in /etc/passwd"),
            Unknown::Group(name) => format!("the image has no group {name:?} in /etc/group"),
        },
    })
}

fn c_string(text: &str) -> Result<CString, StartError> {
    CString::new(text)
        .map_err(|_| invalid("arguments, environment and folder may not contain a NUL byte"))
}

fn c_strings(texts: &[String]) -> Result<Vec<CString>, StartError> {
    texts.iter().map(|text| c_string(text)).collect()
}

fn invalid(message: &str) -> StartError {
    StartError {
        kind: StartFailure::Invalid,
        message: message.into(),
    }
}

/// Describes an errno: in words if users meet it, otherwise by number.
pub fn reason(errno: Errno) -> String {
    let words = match errno {
        Errno::PERM => "operation not permitted",
        Errno::NOENT => "no such file or directory",
        Errno::IO => "input/output error",
        Errno::NXIO => "no such device or address",
        Errno::TOOBIG => "arguments and environment are too long",
        Errno::AGAIN => "too many processes",
        Errno::NOMEM => "out of memory",
        Errno::ACCESS => "permission denied",
        Errno::BUSY => "device or file in use",
        Errno::EXIST => "it exists already",
        Errno::NODEV => "no such device or file system type",
        Errno::NOTDIR => "not a directory",
        Errno::ISDIR => "it is a directory",
        Errno::INVAL => "invalid argument, or no such file system on it",
        Errno::MFILE | Errno::NFILE => "too many open files",
        Errno::TXTBSY => "the file is being written",
        Errno::FBIG => "file too large",
        Errno::NOSPC => "no space left on the device",
        Errno::ROFS => "read-only file system",
        Errno::NAMETOOLONG => "name too long",
        Errno::NOSYS | Errno::OPNOTSUPP => "not supported by this kernel",
        Errno::LOOP => "too many symbolic links",
        Errno::NOTEMPTY => "directory not empty",
        Errno::STALE => "the host has removed or replaced it",
        Errno::NOTCONN => "not connected to the server of its folder",
        Errno::CONNREFUSED => "connection refused",
        Errno::CONNRESET => "connection reset",
        Errno::TIMEDOUT => "timed out",
        Errno::AFNOSUPPORT => "address family not supported by this kernel",
        other => return format!("error {}", other.raw_os_error()),
    };
    words.into()
}

/// Converts a path to a C string; the errno is the one the kernel would return.
///
/// # Errors
///
/// `EINVAL` if it has a NUL byte.
pub fn path_c_string(path: &str) -> Result<CString, Errno> {
    CString::new(path).map_err(|_| Errno::INVAL)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec;

    fn command(argv: &[&str]) -> Command {
        Command {
            argv: argv.iter().map(|a| a.to_string()).collect(),
            ..Command::default()
        }
    }

    #[test]
    fn a_name_is_tried_in_every_folder_in_order() {
        assert_eq!(
            candidates("ls", "/a:/b/::/c"),
            ["/a/ls", "/b/ls", "./ls", "/c/ls"]
        );
    }

    #[test]
    fn a_path_is_taken_as_it_is() {
        assert_eq!(candidates("./ls", "/a:/b"), ["./ls"]);
        assert_eq!(candidates("/bin/ls", "/a"), ["/bin/ls"]);
    }

    #[test]
    fn defaults_fill_only_what_is_missing() {
        let mut asked = command(&["x"]);
        asked.env = vec!["HOME=/h".into(), "PATHOLOGY=1".into()];
        assert_eq!(
            environment(&asked, None),
            [
                format!("PATH={DEFAULT_PATH}").as_str(),
                "HOME=/h",
                "PATHOLOGY=1"
            ]
        );
        asked.env = vec!["PATH=/p".into(), "HOME=/h".into()];
        asked.tty = Some(jiffy_wire::agent::WindowSize {
            rows: 1,
            columns: 1,
        });
        assert_eq!(
            environment(&asked, None),
            ["TERM=xterm", "PATH=/p", "HOME=/h"]
        );
    }

    #[test]
    fn invalid_commands_and_unknown_users_are_refused() {
        for bad in [command(&[]), command(&[""]), command(&["a\0b"])] {
            assert_eq!(Prepared::new(&bad).unwrap_err().kind, StartFailure::Invalid);
        }
        let mut bad = command(&["ls"]);
        bad.user = Some("no-such-user-here".into());
        let error = Prepared::new(&bad).unwrap_err();
        assert_eq!(error.kind, StartFailure::NoSuchUser);
        assert!(error.message.contains("no-such-user-here"));
    }

    proptest! {
        #[test]
        fn each_folder_gives_one_candidate_that_ends_in_the_name(
            name in "[a-z]{1,8}", folders in proptest::collection::vec("[a-z/]{0,8}", 1..8)
        ) {
            let found = candidates(&name, &folders.join(":"));
            prop_assert_eq!(found.len(), folders.len());
            for path in found {
                let tail = format!("/{name}");
                prop_assert!(path.ends_with(&tail));
            }
        }
    }
}
