//! Event descriptors in a poll set, and how long to wait for them.

use rustix::event::{PollFd, PollFlags, Timespec};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;
use vmm_sys_util::eventfd::EventFd;

/// A poll entry that waits until `event` is signalled.
#[allow(unsafe_code)] // The type has no safe borrow of its descriptor.
pub fn readable(event: &EventFd) -> PollFd<'_> {
    // SAFETY: the descriptor stays open as long as `event` is borrowed.
    let fd = unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) };
    PollFd::from_borrowed_fd(fd, PollFlags::IN)
}

/// A duration in `poll`'s format.
pub fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: duration.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}
