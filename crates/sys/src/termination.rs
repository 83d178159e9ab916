//! SIGTERM and SIGINT as a descriptor.
#![allow(unsafe_code)] // sigprocmask and signalfd.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

/// Readable once the process was asked to end.
#[derive(Debug)]
pub struct TerminationFd(OwnedFd);

impl TerminationFd {
    /// Blocks both signals in this thread, and in those it starts from now on,
    /// and makes them readable. Call before any thread exists.
    pub fn block() -> io::Result<TerminationFd> {
        // SAFETY: the set is initialised by sigemptyset; signalfd makes a new
        // descriptor that nobody else owns.
        unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&mut set);
            libc::sigaddset(&mut set, libc::SIGTERM);
            libc::sigaddset(&mut set, libc::SIGINT);
            let error = libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
            if error != 0 {
                return Err(io::Error::from_raw_os_error(error));
            }
            let fd = libc::signalfd(-1, &set, libc::SFD_NONBLOCK | libc::SFD_CLOEXEC);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(TerminationFd(OwnedFd::from_raw_fd(fd)))
        }
    }
}

/// Leaves both signals to the other threads of this process.
pub fn leave_to_others() {
    // SAFETY: the set is initialised by sigemptyset; only this thread's mask
    // changes. It fails for no valid `how`.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGTERM);
        libc::sigaddset(&mut set, libc::SIGINT);
        libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
    }
}

impl AsFd for TerminationFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
