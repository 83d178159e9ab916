//! Confines the server once the disk is open and its socket listens, and further confines the
//! process that serves a monitor.

use jiffy_jail::confine::{self, ConfineError, Folders};
use jiffy_sys::seccomp;
use jiffy_sys::seccomp::filter::{Filter, Refusal, call, call_with};
use jiffy_sys::seccomp::lists::{CONNECTIONS, FIONBIO, OPEN_FILES, PROCESS, PROCESSES, THREADS};
use std::io;
use std::path::Path;

/// Confines this process, which has one thread, to the folder of its socket, whose file it removes
/// at the end, and filters its system calls. Returns false where the kernel has no Landlock.
///
/// # Errors
///
/// If the kernel refuses the restrictions.
pub fn of_server(folder: &Path) -> Result<bool, ConfineError> {
    let has_landlock = confine::confine(&Folders {
        // Threads are counted before a fork.
        readable: &[Path::new("/proc")],
        writable: &[folder],
        ..Folders::default()
    })?;
    let failed = |error| ConfineError::System("filtering system calls", error);
    seccomp::install(&SERVER).map_err(failed)?;
    Ok(has_landlock)
}

/// Filters the system calls of the process that serves one monitor.
///
/// # Errors
///
/// If the kernel refuses the filter.
pub fn of_monitor() -> io::Result<()> {
    seccomp::install(&MONITOR)
}

/// The server waits for connections and for the end of its children, which it forks; they add
/// [`MONITOR`].
static SERVER: Filter = Filter::build(
    &[
        PROCESS,
        PROCESSES,
        OPEN_FILES,
        CONNECTIONS,
        &[
            call_with(libc::SYS_ioctl, 1, &[FIONBIO]),
            // Counting its threads, and removing its socket.
            call(libc::SYS_openat),
            call(libc::SYS_getdents64),
            call(libc::SYS_unlink),
            // The child's own filter.
            call(libc::SYS_seccomp),
        ],
    ],
    Refusal::Error,
);

/// The disk and the socket are open: the process accepts a connection, maps the memory of the
/// monitor's guest, and waits for requests and answers them.
static MONITOR: Filter = Filter::build(
    &[
        PROCESS,
        THREADS,
        OPEN_FILES,
        CONNECTIONS,
        &[call_with(libc::SYS_ioctl, 1, &[FIONBIO])],
    ],
    Refusal::Error,
);
