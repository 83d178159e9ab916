//! The node on this host: connects to it, or starts it first.

use super::folders::Folders;
use super::wait::read_until;
use crate::failure::{Failure, Result, reason};
use jiffy_sys::locked::{self, Locked};
use jiffy_sys::spawn::{Detached, Environment, spawn_detached};
use rustix::pipe::{PipeFlags, pipe_with};
use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Timeout of a daemon that is started. One that fails closes its pipe at once, so only one that
/// hangs is waited for as long.
const START_TIMEOUT: Duration = Duration::from_secs(90);
/// Most bytes of the log's end that are searched for a cause.
const LOG_TAIL: u64 = 4096;

/// A connection to the node if it runs.
pub fn connect(folders: &Folders) -> Option<UnixStream> {
    UnixStream::connect(folders.socket()).ok()
}

/// A connection to the node, which is started if it does not run. The run folder must exist and
/// belong to this user.
///
/// # Errors
///
/// If jiffyd or its folders are missing, it ends at its start, or it does not listen in time.
pub fn connect_or_start(folders: &Folders) -> Result<UnixStream> {
    if let Some(connection) = connect(folders) {
        return Ok(connection);
    }
    let lock = spawn_lock(folders)?;
    // The previous holder of the lock may have started it.
    if let Some(connection) = connect(folders) {
        return Ok(connection);
    }
    let started = start(folders);
    drop(lock);
    match connect(folders) {
        Some(connection) => Ok(connection),
        None => Err(started.err().unwrap_or_else(|| {
            Failure::new("jiffyd was started but does not answer")
                .hint(format!("its log is {}", log_path(folders).display()))
        })),
    }
}

fn log_path(folders: &Folders) -> PathBuf {
    folders.run.join("jiffyd.log")
}

/// Starts `jiffyd` and returns when it listens.
fn start(folders: &Folders) -> Result<()> {
    let socket = folders.socket();
    let program = folders.program("jiffyd")?;
    let log_path = log_path(folders);
    let log = OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(&log_path)
        .map_err(|error| {
            Failure::io(
                format_args!("{} can't be written", log_path.display()),
                error,
            )
        })?;
    let log_start = log.metadata().map_or(0, |facts| facts.len());
    let (ready, readiness) = pipe_with(PipeFlags::CLOEXEC)
        .map_err(|error| Failure::io("a pipe can't be made", error))?;
    let arguments: [&OsStr; 12] = [
        "--data".as_ref(),
        folders.data()?.as_ref(),
        "--run".as_ref(),
        folders.run.as_ref(),
        "--lib".as_ref(),
        folders.lib.as_ref(),
        "--share".as_ref(),
        folders.share.as_ref(),
        "--socket".as_ref(),
        socket.as_ref(),
        "--ready-fd".as_ref(),
        "3".as_ref(),
    ];
    spawn_detached(&Detached {
        program: &program,
        arguments: &arguments,
        directory: Path::new("/"),
        output: log.as_fd(),
        descriptors: &[readiness.as_fd()],
        environment: Environment::Inherited,
    })
    .map_err(|error| {
        Failure::io(
            format_args!("{} can't be started", program.display()),
            error,
        )
    })?;
    drop(readiness);
    match wait_until_listening(ready) {
        Ok(true) => Ok(()),
        Ok(false) => Err(did_not_start(&log_path, log_start)),
        Err(error) => Err(Failure::new(format!(
            "jiffyd was started but does not listen: {}",
            reason(&error)
        ))
        .hint(format!("its log is {}", log_path.display()))),
    }
}

/// Locks the start, so that only one process starts the node; unlocked when dropped.
fn spawn_lock(folders: &Folders) -> Result<Locked> {
    let path = folders.run.join("jiffyd.start");
    let failed =
        |error: io::Error| Failure::io(format_args!("{} can't be locked", path.display()), error);
    locked::open(&path)
        .and_then(Locked::exclusive)
        .map_err(failed)
}

/// Waits for the daemon's byte; false if the daemon ended without sending it.
fn wait_until_listening(ready: OwnedFd) -> io::Result<bool> {
    let mut byte = [0];
    let count = read_until(&ready, &mut byte, Instant::now() + START_TIMEOUT)?;
    Ok(count == 1)
}

/// The failure to start, with the last line of the daemon's log.
fn did_not_start(log: &Path, since: u64) -> Failure {
    let said = last_line(log, since);
    let failure = match said {
        Some(line) => Failure::new(format!("jiffyd did not start: {line}")),
        None => Failure::new("jiffyd did not start and did not say why"),
    };
    failure.hint(format!("its log is {}", log.display()))
}

fn last_line(log: &Path, since: u64) -> Option<String> {
    let mut file = fs::File::open(log).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(since.max(length.saturating_sub(LOG_TAIL))))
        .ok()?;
    let mut text = Vec::new();
    file.take(LOG_TAIL).read_to_end(&mut text).ok()?;
    let text = String::from_utf8_lossy(&text);
    let lines = || text.lines().map(str::trim).filter(|line| !line.is_empty());
    // Its error message explains more than its log lines.
    let own = |line: &&str| line.starts_with("jiffyd: ") || line.starts_with("error: ");
    let said = lines().rfind(own).or_else(|| lines().next_back())?;
    let said = said.strip_prefix("jiffyd: ").unwrap_or(said);
    Some(said.strip_prefix("error: ").unwrap_or(said).to_owned())
}
