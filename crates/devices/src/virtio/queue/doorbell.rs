//! The event descriptor (ioeventfd) that a device's thread sleeps on.
#![allow(unsafe_code)] // `EventFd` has no safe way to lend its descriptor.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use vmm_sys_util::eventfd::EventFd;

/// Makes reads of `doorbell` block, so that a thread with nothing else to watch sleeps with
/// one system call.
///
/// # Errors
///
/// If the ioctl fails.
pub(crate) fn make_blocking(doorbell: &EventFd) -> io::Result<()> {
    Ok(rustix::io::ioctl_fionbio(descriptor(doorbell), false)?)
}

/// Borrows the descriptor.
pub(crate) fn descriptor(doorbell: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: the descriptor is open as long as `doorbell`, which outlives the result.
    unsafe { BorrowedFd::borrow_raw(doorbell.as_raw_fd()) }
}
