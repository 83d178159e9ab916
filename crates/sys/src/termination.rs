//! SIGTERM and SIGINT as a descriptor.
#![allow(unsafe_code)] // sigprocmask and signalfd.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

/// A descriptor that is readable once SIGTERM or SIGINT was received.
#[derive(Debug)]
pub struct TerminationFd(OwnedFd);

impl TerminationFd {
    /// Blocks both signals in this thread and in threads that it starts later, and makes them
    /// readable. Call it before any other thread exists.
    ///
    /// # Errors
    ///
    /// If pthread_sigmask(3) or signalfd(2) fails.
    pub fn block() -> io::Result<TerminationFd> {
        // SAFETY: sigemptyset initialises the set; signalfd returns a new descriptor without
        // another owner.
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

/// Blocks both signals in this thread, so that other threads of this process get them.
pub fn block_in_this_thread() {
    // SAFETY: sigemptyset initialises the set. Only this thread's mask changes, and the call does
    // not fail for a valid `how`.
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
