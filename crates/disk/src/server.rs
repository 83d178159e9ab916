//! The listening socket, and a process for each monitor that connects.

use crate::confinement;
use crate::device::Disk;
use crate::options::Serve;
use jiffy_devices::GuestMemory;
use jiffy_devices::virtio::block::{Backend, BlockError, BlockOptions};
use jiffy_devices::virtio::queue::RateLimit;
use jiffy_jail::confine::ConfineError;
use jiffy_sys::fork::{Child, Fork, fork};
use jiffy_sys::private_socket::bind_private;
use jiffy_sys::termination::TerminationFd;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{RenameFlags, renameat_with};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;
use thiserror::Error;
use tracing::{info, warn};
use vhost::vhost_user::{Error as VhostUserError, Listener};
use vhost_user_backend::{Error as DaemonError, VhostUserDaemon};
use vm_memory::GuestMemoryAtomic;

/// Most monitors that wait in the socket's queue.
const BACKLOG: i32 = 16;
/// How long a monitor may take for its first message, because others wait for it.
const GREETING_TIME: Duration = Duration::from_secs(15);

/// Why a disk can't be served.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The disk can't be opened.
    #[error(transparent)]
    Disk(#[from] BlockError),
    /// The path exists, and is not the stale socket of a server that has ended.
    #[error("{0:?} exists already; another server may be listening")]
    Taken(PathBuf),
    /// The socket can't be created.
    #[error("the socket {0:?} can't be made: {1}")]
    Socket(PathBuf, io::Error),
    /// The process can't be confined.
    #[error("the server can't be confined")]
    Confinement(#[from] ConfineError),
    /// A system call failed unexpectedly.
    #[error("{0}: {1}")]
    System(&'static str, io::Error),
}

fn failed(what: &'static str) -> impl Fn(io::Error) -> ServeError {
    move |error| ServeError::System(what, error)
}

/// Serves a disk until SIGTERM or SIGINT. This process must have only one thread, because it forks.
///
/// # Errors
///
/// If the disk can't be opened or locked, the socket's path exists and is no stale socket, the
/// process can't be confined, or `poll` or `fork` fails.
pub fn serve(options: &Serve) -> Result<(), ServeError> {
    let termination = TerminationFd::block().map_err(failed("signals can't be waited for"))?;
    // The disk is open and locked in this process and in all that it forks.
    let backend = Arc::new(Backend::open(&BlockOptions {
        path: options.file.clone(),
        read_only: !options.writable,
        direct: false,
        id: "jiffy".to_owned(),
        limit: RateLimit::default(),
    })?);
    let socket = Socket::bind(&options.socket)?;
    if !confinement::of_server(folder_of(&options.socket))? {
        info!(
            "this kernel has no Landlock: only file permissions restrict which files are reached"
        );
    }
    info!(
        disk = %options.file.display(),
        bytes = backend.state().bytes,
        socket = %options.socket.display(),
        "serving"
    );
    let mut monitor: Option<Child> = None;
    loop {
        // One monitor is served at a time; the others wait in the socket's queue.
        let awaited = match &monitor {
            None => PollFd::new(&socket.listener, PollFlags::IN),
            Some(child) => PollFd::new(child, PollFlags::IN),
        };
        let mut events = [PollFd::new(&termination, PollFlags::IN), awaited];
        match poll(&mut events, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(failed("poll(2) failed")(error.into())),
        }
        let [end, happened] = events.map(|event| !event.revents().is_empty());
        if end {
            // Dropping the monitor's process ends it.
            return Ok(());
        }
        if !happened {
            continue;
        }
        monitor = match monitor.take() {
            Some(child) => {
                match child.wait() {
                    Ok(status) if status.success() => info!("the monitor has disconnected"),
                    Ok(status) => warn!(%status, "the process that served a monitor failed"),
                    Err(error) => {
                        warn!(%error, "the exit status of the process that served a monitor is not known")
                    }
                }
                None
            }
            None => match fork().map_err(failed("a process for a monitor can't be forked"))? {
                Fork::Parent(child) => Some(child),
                Fork::Child => {
                    let code = serve_one(&socket.listener, backend, options.queues);
                    std::process::exit(code);
                }
            },
        };
    }
}

/// Serves one monitor; returns the exit status for its process.
fn serve_one(listener: &UnixListener, backend: Arc<Backend>, queues: u16) -> i32 {
    let served = confinement::of_monitor()
        .and_then(|()| listener.try_clone())
        .map_err(DaemonError::StartDaemon)
        .and_then(|listener| {
            let memory = GuestMemoryAtomic::new(GuestMemory::new());
            let disk = Arc::new(Disk::new(backend, queues, memory.clone()));
            let greeted = disk.greeted();
            let mut daemon = VhostUserDaemon::new("disk".to_owned(), disk, memory)?;
            daemon.start(&mut Listener::from(listener))?;
            info!("a monitor has connected");
            end_if_silent(greeted)?;
            let end = daemon.wait();
            // Dropping the daemon would wait for its threads, which end with this process.
            std::mem::forget(daemon);
            end
        });
    match served {
        // Monitors end by closing the connection.
        Ok(())
        | Err(DaemonError::HandleRequest(
            VhostUserError::Disconnected | VhostUserError::PartialMessage,
        )) => 0,
        Err(error) => {
            warn!(%error, "closed the connection of a monitor");
            1
        }
    }
}

/// Ends this process if the monitor sends no whole message in time. After its first message a
/// monitor may take any time: its guest may not have probed the disk yet.
fn end_if_silent(greeted: Arc<AtomicBool>) -> Result<(), DaemonError> {
    let watch = move || {
        thread::sleep(GREETING_TIME);
        if !greeted.load(Ordering::Acquire) {
            warn!("closed the connection of a monitor: it sent no message in time");
            std::process::exit(1);
        }
    };
    thread::Builder::new()
        .name("greeting".into())
        .spawn(watch)
        .map(drop)
        .map_err(DaemonError::StartDaemon)
}

fn folder_of(file: &Path) -> &Path {
    match file.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// A socket file that is removed when this is dropped.
struct Socket {
    listener: UnixListener,
    path: PathBuf,
}

impl Socket {
    /// Creates the socket under a hidden name and renames it once it listens, so that a client that
    /// waits for the file can connect.
    fn bind(path: &Path) -> Result<Socket, ServeError> {
        let failed = |error: io::Error| ServeError::Socket(path.to_owned(), error);
        // Checked early: clients could not connect to a longer name.
        SocketAddr::from_pathname(path).map_err(failed)?;
        let name = path
            .file_name()
            .ok_or_else(|| failed(io::ErrorKind::InvalidInput.into()))?;
        let folder = File::open(folder_of(path)).map_err(failed)?;
        let hidden = format!(".jiffy-disk-{}", std::process::id());
        // A path by the folder's descriptor, which is short enough for a socket address.
        let there = PathBuf::from(format!("/proc/self/fd/{}", folder.as_raw_fd())).join(&hidden);
        let listener = bind_private(&there, BACKLOG).map_err(failed)?;
        let mut placed = rename_into_place(&folder, &hidden, name);
        if matches!(placed, Err(Errno::EXIST)) && is_stale(path).map_err(failed)? {
            std::fs::remove_file(path).map_err(failed)?;
            placed = rename_into_place(&folder, &hidden, name);
        }
        if let Err(error) = placed {
            let _ = std::fs::remove_file(&there);
            return Err(match error {
                Errno::EXIST => ServeError::Taken(path.to_owned()),
                error => failed(error.into()),
            });
        }
        Ok(Socket {
            listener,
            path: path.to_owned(),
        })
    }
}

fn rename_into_place(folder: &File, hidden: &str, name: &OsStr) -> Result<(), Errno> {
    renameat_with(folder, hidden, folder, name, RenameFlags::NOREPLACE)
}

/// Whether the path is the stale socket of a server that was killed. Other files must not be
/// removed; a plain file refuses connections as well.
fn is_stale(path: &Path) -> io::Result<bool> {
    let is_socket = std::fs::symlink_metadata(path)?.file_type().is_socket();
    let refuses = || {
        UnixStream::connect(path)
            .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
    };
    Ok(is_socket && refuses())
}

impl Drop for Socket {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.path) {
            warn!(%error, "the socket could not be removed");
        }
    }
}
