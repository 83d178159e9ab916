//! The process at the other end of a Unix socket.
#![allow(unsafe_code)] // getsockopt: rustix has no process id 0, which the kernel may return.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Who connected, or began to listen, at the other end (unix(7), SO_PEERCRED).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Its process id; `None` if this PID namespace has no id for it.
    pub pid: Option<u32>,
    /// Its effective user id.
    pub uid: u32,
}

impl Peer {
    /// The peer of a connected Unix socket.
    ///
    /// # Errors
    ///
    /// If getsockopt(2) fails.
    pub fn of(socket: &impl AsFd) -> io::Result<Peer> {
        let mut found = libc::ucred {
            pid: 0,
            uid: 0,
            gid: 0,
        };
        let mut length = size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: the kernel writes at most `length` bytes to `found`, which has that many.
        let result = unsafe {
            libc::getsockopt(
                socket.as_fd().as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut found).cast(),
                &raw mut length,
            )
        };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Peer {
            pid: u32::try_from(found.pid).ok().filter(|pid| *pid != 0),
            uid: found.uid,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn both_ends_of_a_pair_are_this_process() {
        let (one, other) = UnixStream::pair().unwrap();
        let me = Peer {
            pid: Some(std::process::id()),
            uid: rustix::process::geteuid().as_raw(),
        };
        assert_eq!(Peer::of(&one).unwrap(), me);
        assert_eq!(Peer::of(&other).unwrap(), me);
        assert!(Peer::of(&std::fs::File::open("/dev/null").unwrap()).is_err());
    }
}
