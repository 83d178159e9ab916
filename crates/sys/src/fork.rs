//! fork(2), for processes with one thread.
#![allow(unsafe_code)] // fork has no safe wrapper.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

/// Parent or child.
#[derive(Debug)]
pub enum Fork {
    /// The parent.
    Parent(Child),
    /// The child. It gets SIGKILL when its parent dies.
    Child,
}

/// A forked process; it is killed and reaped when this is dropped. Its
/// descriptor is readable once it has ended.
#[derive(Debug)]
pub struct Child {
    pid: libc::pid_t,
    pidfd: OwnedFd,
    reaped: bool,
}

/// Forks this process. Refused if it has more than one thread: the child would have the
/// locks of the others, and not the threads.
pub fn fork() -> io::Result<Fork> {
    let threads = std::fs::read_dir("/proc/self/task")?.count();
    if threads != 1 {
        return Err(io::Error::other(format!(
            "a process with {threads} threads can't be forked"
        )));
    }
    // SAFETY: there is no other thread that could hold a lock or be in the
    // middle of changing something; prctl and getppid take numbers.
    unsafe {
        let parent = libc::getpid();
        match libc::fork() {
            ..0 => Err(io::Error::last_os_error()),
            0 => {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                if libc::getppid() != parent {
                    // It died before it could be watched.
                    libc::_exit(1);
                }
                Ok(Fork::Child)
            }
            pid => Child::of(pid).map(Fork::Parent),
        }
    }
}

impl Child {
    fn of(pid: libc::pid_t) -> io::Result<Child> {
        // SAFETY: pidfd_open takes numbers and makes a descriptor that nobody
        // else owns. The process is not reaped yet, so the number is its own.
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

    /// Waits for its end.
    pub fn wait(mut self) -> io::Result<ExitStatus> {
        self.reap()
    }

    fn reap(&mut self) -> io::Result<ExitStatus> {
        self.reaped = true;
        let mut status = 0;
        loop {
            // SAFETY: `status` outlives the call; the process is a child of
            // this one that nobody else waits for.
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
            // SAFETY: takes numbers; the process is not reaped, so the number
            // is its own.
            unsafe { libc::kill(self.pid, libc::SIGKILL) };
            let _ = self.reap();
        }
    }
}
