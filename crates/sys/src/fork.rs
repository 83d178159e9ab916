//! fork(2) for processes with one thread, and child processes.
#![allow(unsafe_code)] // fork has no safe wrapper.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

/// Result of a fork.
#[derive(Debug)]
pub enum Fork {
    /// The parent.
    Parent(Child),
    /// The child. It gets SIGKILL when its parent dies.
    Child,
}

/// A child process. It is killed and reaped when this is dropped. Its descriptor (pidfd) is
/// readable once it has ended.
#[derive(Debug)]
pub struct Child {
    pid: libc::pid_t,
    pidfd: OwnedFd,
    reaped: bool,
}

/// Forks this process.
///
/// # Errors
///
/// If this process has more than one thread, because the child would inherit their locks but not
/// the threads; if procfs can't be read; if fork(2) or pidfd_open(2) fails. No child is left then.
pub fn fork() -> io::Result<Fork> {
    let threads = std::fs::read_dir("/proc/self/task")?.count();
    if threads != 1 {
        return Err(io::Error::other(format!(
            "a process with {threads} threads can't be forked"
        )));
    }
    // SAFETY: no other thread exists that could hold a lock or be changing something; prctl and
    // getppid take numbers.
    unsafe {
        let parent = libc::getpid();
        match libc::fork() {
            ..0 => Err(io::Error::last_os_error()),
            0 => {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                if libc::getppid() != parent {
                    // The parent died before PR_SET_PDEATHSIG took effect.
                    libc::_exit(1);
                }
                Ok(Fork::Child)
            }
            pid => Child::of(pid).map(Fork::Parent),
        }
    }
}

impl Child {
    /// A child of this process that was just started and that nobody else reaps.
    ///
    /// # Errors
    ///
    /// `InvalidInput` if `pid` is too large for an id. If pidfd_open(2) fails: then the child was
    /// killed and reaped.
    pub fn started(pid: u32) -> io::Result<Child> {
        let invalid = |_| io::Error::from(io::ErrorKind::InvalidInput);
        Child::of(libc::pid_t::try_from(pid).map_err(invalid)?)
    }

    fn of(pid: libc::pid_t) -> io::Result<Child> {
        // SAFETY: pidfd_open takes numbers and returns a new descriptor without another owner. The
        // process is not reaped yet, so its id is not reused.
        let pidfd = unsafe {
            let fd = libc::syscall(libc::SYS_pidfd_open, pid, 0);
            if fd < 0 {
                let error = io::Error::last_os_error();
                libc::kill(pid, libc::SIGKILL);
                libc::waitpid(pid, std::ptr::null_mut(), 0);
                return Err(error);
            }
            OwnedFd::from_raw_fd(fd as i32)
        };
        Ok(Child {
            pid,
            pidfd,
            reaped: false,
        })
    }

    /// Waits until the child has ended.
    ///
    /// # Errors
    ///
    /// As for [`status`](Child::status).
    pub fn wait(mut self) -> io::Result<ExitStatus> {
        self.status()
    }

    /// Waits until the child has ended, and reaps it: call it once.
    ///
    /// # Errors
    ///
    /// `NotFound` if the child was reaped already. Otherwise if waitpid(2) fails.
    pub fn status(&mut self) -> io::Result<ExitStatus> {
        if self.reaped {
            return Err(io::ErrorKind::NotFound.into());
        }
        self.reap()
    }

    fn reap(&mut self) -> io::Result<ExitStatus> {
        self.reaped = true;
        let mut status = 0;
        loop {
            // SAFETY: `status` outlives the call, and nobody else waits for this child.
            if unsafe { libc::waitpid(self.pid, &mut status, 0) } == self.pid {
                return Ok(ExitStatus::from_raw(status));
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }
}

impl AsFd for Child {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if !self.reaped {
            // SAFETY: kill takes numbers; the process is not reaped, so its id is not reused.
            unsafe { libc::kill(self.pid, libc::SIGKILL) };
            let _ = self.reap();
        }
    }
}
