//! Starts a program in a jail, and finds out which jails work on this host.

use crate::child::{self, Plan, Stage};
use crate::clone;
use crate::level::Level;
use crate::limits::Limits;
use std::ffi::{CString, OsStr};
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::ptr;
use thiserror::Error;

/// The descriptor number of the first of [`Program::descriptors`] in the program.
pub const FIRST_DESCRIPTOR: i32 = 3;

/// The folder that becomes the root: empty, and not writable.
const EMPTY: &str = "empty";

/// The program to execute. It must be linked statically: there are no libraries in the jail.
#[derive(Debug)]
pub struct Program<'a> {
    /// The executable, open.
    pub file: BorrowedFd<'a>,
    /// All arguments, beginning with its name.
    pub arguments: &'a [&'a OsStr],
    /// All of its environment, as `NAME=value`.
    pub environment: &'a [&'a OsStr],
    /// Its standard output and standard error; stdin is /dev/null.
    pub output: BorrowedFd<'a>,
    /// The descriptors that become 3, 4, …; all others are closed.
    pub descriptors: &'a [BorrowedFd<'a>],
    /// Whether one more descriptor follows: of the program's own folder in procfs. The program must
    /// close it before it handles untrusted input.
    pub own_proc: bool,
}

/// The environment of a program.
#[derive(Debug)]
pub struct Jail<'a> {
    /// Its level of isolation.
    pub level: Level,
    /// User and group id, with [`Level::OwnUser`].
    pub user: u32,
    /// The one supplementary group, with [`Level::OwnUser`].
    pub group: u32,
    /// The working directory, and the only part of the file system that can be reached, read-only:
    /// the program can connect to sockets in it.
    pub folder: &'a Path,
    /// A folder with the empty folder for the root ([`Jail::prepare`]).
    pub run: &'a Path,
    /// Resource limits.
    pub limits: Limits,
    /// An open descriptor of the cgroup (version 2) that it starts in.
    pub cgroup: Option<BorrowedFd<'a>>,
}

/// Why a program could not be started.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// A step in this process failed.
    #[error("a process could not be started")]
    Start(#[source] io::Error),
    /// A step in the new process failed.
    #[error("a new process could not {step}")]
    Step {
        /// The step, to follow "could not".
        step: &'static str,
        /// The error.
        source: io::Error,
    },
}

impl LaunchError {
    /// The error of the system call.
    pub fn io(&self) -> &io::Error {
        match self {
            LaunchError::Start(error) | LaunchError::Step { source: error, .. } => error,
        }
    }
}

impl Jail<'_> {
    /// Creates the empty folders that jails need.
    ///
    /// # Errors
    ///
    /// If a folder can't be created, or chmod(2) of it fails.
    pub fn prepare(run: &Path) -> io::Result<()> {
        let empty = run.join(EMPTY);
        let root = empty.join(OsStr::from_bytes(child::INNER.to_bytes()));
        DirBuilder::new().recursive(true).create(&root)?;
        // Independent of the umask.
        for folder in [&root, &empty] {
            fs::set_permissions(folder, fs::Permissions::from_mode(0o555))?;
        }
        Ok(())
    }

    /// Starts the program in a new session. Returns its process id in this process's namespace; the
    /// caller must reap it.
    ///
    /// # Errors
    ///
    /// [`LaunchError::Start`] if a path or a string contains a zero byte, no descriptor is free, or
    /// clone3(2) fails. [`LaunchError::Step`] if the new process fails before or at the execution
    /// of the program. No process is left then.
    pub fn launch(&self, program: &Program<'_>) -> Result<u32, LaunchError> {
        self.start(Some(program))
    }

    /// The strongest level that works here, and why the stronger ones do not. `run` was prepared;
    /// each level is tried with a process that exits at once.
    pub fn strongest_level(run: &Path, user: u32) -> (Level, Vec<LaunchError>) {
        let is_root = rustix::process::geteuid().is_root();
        let mut levels = vec![Level::UserNamespace];
        if is_root {
            levels.insert(0, Level::OwnUser);
        }
        let mut refused = Vec::new();
        for level in levels {
            match Jail::try_level(level, run, user) {
                Ok(()) => return (level, refused),
                Err(error) => refused.push(error),
            }
        }
        (Level::Bare, refused)
    }

    /// Runs a process through all steps before the program, and lets it end.
    fn try_level(level: Level, run: &Path, user: u32) -> Result<(), LaunchError> {
        let jail = Jail {
            level,
            user,
            group: user,
            folder: run,
            run,
            limits: Limits {
                files: 64,
                processes: 64,
                file_size: None,
            },
            cgroup: None,
        };
        let pid = jail.start(None)?;
        let pid = rustix::process::Pid::from_raw(pid as i32);
        let waited = rustix::process::waitpid(pid, rustix::process::WaitOptions::empty());
        match waited.map_err(|error| LaunchError::Start(error.into()))? {
            Some((_, status)) if status.exit_status() == Some(0) => Ok(()),
            _ => Err(LaunchError::Start(io::Error::other(
                "the process was killed",
            ))),
        }
    }

    fn start(&self, program: Option<&Program<'_>>) -> Result<u32, LaunchError> {
        let failed = LaunchError::Start;
        let null = File::open("/dev/null").map_err(failed)?;
        let nothing = Program {
            file: null.as_fd(),
            arguments: &[],
            environment: &[],
            output: null.as_fd(),
            descriptors: &[],
            own_proc: false,
        };
        let given = program.unwrap_or(&nothing);
        let folder = c_string(self.folder.as_os_str()).map_err(failed)?;
        let empty = c_string(self.run.join(EMPTY).as_os_str()).map_err(failed)?;
        let arguments = Strings::new(given.arguments).map_err(failed)?;
        let environment = Strings::new(given.environment).map_err(failed)?;
        let sources = Sources::new(given, &null).map_err(failed)?;
        let user_map = map(rustix::process::geteuid().as_raw());
        let group_map = map(rustix::process::getegid().as_raw());
        let limits = self.limits.all();
        let mut plan = Plan {
            level: self.level,
            user: self.user,
            group: self.group,
            user_map: user_map.as_bytes(),
            group_map: group_map.as_bytes(),
            folder: &folder,
            empty: &empty,
            limits: &limits,
            sources: sources.numbers(),
            own_proc: given.own_proc,
            program: program.map(|_| sources.program()),
            arguments: arguments.as_ptr(),
            environment: environment.as_ptr(),
            failed: None,
        };
        let cgroup = self.cgroup.map(|cgroup| cgroup.as_raw_fd());
        // SAFETY: `child::run` meets the requirements on a child.
        #[allow(unsafe_code)]
        let pid =
            unsafe { clone::vfork_into(self.level.namespaces(), cgroup, child::run, &mut plan) };
        let pid = pid.map_err(failed)?;
        match plan.failed {
            None => Ok(pid as u32),
            Some((stage, error)) => {
                let ended = rustix::process::Pid::from_raw(pid);
                // It has ended already; this only reaps it.
                let _ = rustix::process::waitpid(ended, rustix::process::WaitOptions::empty());
                Err(LaunchError::Step {
                    step: Stage::name(stage),
                    source: io::Error::from_raw_os_error(error),
                })
            }
        }
    }
}

/// A mapping of this user alone, to an id inside the user namespace that is not root.
fn map(outside: u32) -> String {
    format!("{} {outside} 1\n", child::INSIDE)
}

/// Strings as execve(2) takes them.
struct Strings {
    _strings: Vec<CString>,
    pointers: Vec<*const libc::c_char>,
}

impl Strings {
    fn new(texts: &[&OsStr]) -> io::Result<Strings> {
        let strings: Vec<CString> = texts
            .iter()
            .map(|text| c_string(text))
            .collect::<io::Result<_>>()?;
        let end = std::iter::once(ptr::null());
        let pointers = strings.iter().map(|text| text.as_ptr()).chain(end);
        Ok(Strings {
            pointers: pointers.collect(),
            _strings: strings,
        })
    }

    fn as_ptr(&self) -> *const *const libc::c_char {
        self.pointers.as_ptr()
    }
}

/// Descriptors of this process that become 0, 1, …, and the program: none of them has the number of
/// a target, so that no step overwrites a descriptor that a later one needs.
struct Sources {
    numbers: Vec<RawFd>,
    program: OwnedFd,
    _moved: Vec<OwnedFd>,
}

impl Sources {
    fn new(program: &Program<'_>, null: &File) -> io::Result<Sources> {
        let all = [null.as_fd(), program.output, program.output];
        let all = all.iter().chain(program.descriptors);
        let free = RawFd::try_from(3 + program.descriptors.len() + usize::from(program.own_proc))
            .map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut moved = Vec::new();
        let mut numbers = Vec::with_capacity(free as usize);
        for descriptor in all {
            if descriptor.as_raw_fd() >= free {
                numbers.push(descriptor.as_raw_fd());
                continue;
            }
            let copy = rustix::io::fcntl_dupfd_cloexec(descriptor, free)?;
            numbers.push(copy.as_raw_fd());
            moved.push(copy);
        }
        Ok(Sources {
            numbers,
            program: rustix::io::fcntl_dupfd_cloexec(program.file, free)?,
            _moved: moved,
        })
    }

    fn numbers(&self) -> &[RawFd] {
        &self.numbers
    }

    fn program(&self) -> RawFd {
        self.program.as_raw_fd()
    }
}

fn c_string(text: &OsStr) -> io::Result<CString> {
    CString::new(text.as_bytes()).map_err(|_| io::ErrorKind::InvalidInput.into())
}
