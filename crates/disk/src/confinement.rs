//! Confines the server once the disk is open and its socket listens, and further confines the
//! process that serves a monitor.

use jiffy_jail::confine::{self, ConfineError, Folders};
use jiffy_sys::seccomp;
use jiffy_sys::seccomp::filter::{Filter, Refusal, call_with};
use jiffy_sys::seccomp::lists::{CONNECTIONS, FIONBIO, OPEN_FILES, PROCESS};
use std::io;
use std::path::Path;

/// Confines this process, which has one thread, to the folder of its socket, whose file it removes
/// at the end. Returns false where the kernel has no Landlock.
pub fn of_server(folder: &Path) -> Result<bool, ConfineError> {
    confine::confine(&Folders {
        // Threads are counted before a fork.
        readable: &[Path::new("/proc")],
        writable: &[folder],
        ..Folders::default()
    })
}

/// Filters the system calls of the process that serves one monitor.
pub fn of_monitor() -> io::Result<()> {
    seccomp::install(&MONITOR)
}

/// The disk and the socket are open: the process accepts a connection, maps the memory of the
/// monitor's guest, and waits for requests and answers them.
static MONITOR: Filter = Filter::build(
    &[
        PROCESS,
        OPEN_FILES,
        CONNECTIONS,
        &[call_with(libc::SYS_ioctl, 1, &[FIONBIO])],
    ],
    Refusal::Error,
);
