//! Event descriptors in a poll set.

use rustix::event::{PollFd, PollFlags};
use std::os::fd::{AsRawFd, BorrowedFd};
use vmm_sys_util::eventfd::EventFd;

/// Waits for `event` to ring.
#[allow(unsafe_code)] // The type has no safe borrow of its descriptor.
pub fn readable(event: &EventFd) -> PollFd<'_> {
    // SAFETY: the descriptor stays open as long as `event` is borrowed.
    let fd = unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) };
    PollFd::from_borrowed_fd(fd, PollFlags::IN)
}
