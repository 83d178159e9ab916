//! The doorbell a worker sleeps on.
#![allow(unsafe_code)] // `EventFd` has no safe way to lend its descriptor.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use vmm_sys_util::eventfd::EventFd;

/// Lets a read of `doorbell` wait for a ring, so that a thread with nothing
/// else to watch needs one system call to sleep and none to poll.
pub(crate) fn make_blocking(doorbell: &EventFd) -> io::Result<()> {
    Ok(rustix::io::ioctl_fionbio(descriptor(doorbell), false)?)
}

/// The descriptor behind it.
pub(crate) fn descriptor(doorbell: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: the descriptor is open as long as `doorbell`, which outlives
    // what is returned.
    unsafe { BorrowedFd::borrow_raw(doorbell.as_raw_fd()) }
}
