//! Waiting for events with a timeout in nanoseconds (epoll_pwait2(2), Linux 5.11).
#![allow(unsafe_code)] // The system call writes to a list of events.

use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;

/// An event, as the kernel writes it.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Event(libc::epoll_event);

impl Default for Event {
    fn default() -> Event {
        Event(libc::epoll_event { events: 0, u64: 0 })
    }
}

impl Event {
    /// What its source was added with.
    pub fn data(&self) -> u64 {
        self.0.u64
    }

    /// The bits `EPOLLIN` and so on.
    pub fn events(&self) -> u32 {
        self.0.events
    }
}

/// Sleeps until an event comes or `timeout` is over (`None`: forever). Returns how many events were
/// written to the start of `events`.
///
/// # Errors
///
/// Those of the call, such as `Interrupted` when a signal came.
pub fn wait(
    epoll: &impl AsRawFd,
    events: &mut [Event],
    timeout: Option<Duration>,
) -> io::Result<usize> {
    let timeout = timeout.map(|timeout| libc::timespec {
        tv_sec: timeout.as_secs().min(i64::MAX as u64) as i64,
        tv_nsec: timeout.subsec_nanos().into(),
    });
    let timeout = timeout
        .as_ref()
        .map_or(std::ptr::null(), std::ptr::from_ref);
    let room = events.len().min(i32::MAX as usize);
    let mask = std::ptr::null::<libc::sigset_t>();
    // SAFETY: at most `room` events are written, for which there is space, in the layout of
    // `epoll_event`; the timeout is read, and without a mask its size is not.
    let count = unsafe {
        libc::syscall(
            libc::SYS_epoll_pwait2,
            epoll.as_raw_fd(),
            events.as_mut_ptr(),
            room,
            timeout,
            mask,
            0,
        )
    };
    usize::try_from(count).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::{FromRawFd, OwnedFd};
    use std::time::Instant;

    fn epoll() -> OwnedFd {
        // SAFETY: the call has no memory arguments; the descriptor is new.
        unsafe { OwnedFd::from_raw_fd(libc::epoll_create1(libc::EPOLL_CLOEXEC)) }
    }

    #[test]
    fn a_timeout_of_less_than_a_millisecond_is_waited_for() {
        let start = Instant::now();
        let timeout = Duration::from_micros(300);
        let mut events = [Event::default(); 2];
        assert_eq!(wait(&epoll(), &mut events, Some(timeout)).unwrap(), 0);
        assert!(start.elapsed() >= timeout);
    }

    #[test]
    fn an_error_of_the_call_is_returned() {
        let file = std::fs::File::open("/dev/null").unwrap();
        let mut events = [Event::default(); 2];
        let error = wait(&file, &mut events, None).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
    }
}
