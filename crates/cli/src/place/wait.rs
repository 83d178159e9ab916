//! Waits for a child's pipe, with a timeout.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::io;
use std::os::fd::AsFd;
use std::time::Instant;

/// Reads available bytes, at most `buffer`, and waits for them until `end`; 0 when the other side
/// has closed the pipe.
///
/// # Errors
///
/// [`io::ErrorKind::TimedOut`] if `end` has passed. Otherwise if `poll` or `read` fails.
pub fn read_until(fd: impl AsFd, buffer: &mut [u8], end: Instant) -> io::Result<usize> {
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let timeout = Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: left.subsec_nanos().into(),
        };
        match poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)) {
            Ok(0) | Err(Errno::INTR) => continue,
            Ok(_) => {}
            Err(error) => return Err(error.into()),
        }
        match rustix::io::read(&fd, &mut *buffer) {
            Ok(count) => return Ok(count),
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
