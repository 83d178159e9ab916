//! Mounts without a place: from one, nothing above it can be reached.
#![allow(unsafe_code)] // mount_setattr and unshare have no safe wrapper.

use rustix::io::Errno;
use rustix::mount::{OpenTreeFlags, open_tree};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

/// Attributes (`MOUNT_ATTR_…`) of a mount without set-user-id programs, without devices, and on
/// which no program can be executed.
pub const HARMLESS: u64 =
    libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOEXEC;

/// Clones the mount of a folder, detached from any namespace: `..` of it is the folder itself. With
/// `inner`, clones the mounts below as well. Sets these attributes of it (`MOUNT_ATTR_…`,
/// mount_setattr(2)).
///
/// Allocates nothing and takes no lock.
///
/// # Errors
///
/// If open_tree(2) or mount_setattr(2) fails.
pub fn detached(
    parent: impl AsFd,
    folder: &CStr,
    inner: bool,
    attributes: u64,
) -> Result<OwnedFd, Errno> {
    let mut flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH;
    let mut range = libc::AT_EMPTY_PATH;
    if inner {
        flags |= OpenTreeFlags::AT_RECURSIVE;
        range |= libc::AT_RECURSIVE;
    }
    let copy = open_tree(parent, folder, flags)?;
    // SAFETY: all-zero is a valid `mount_attr`.
    let mut wanted: libc::mount_attr = unsafe { std::mem::zeroed() };
    wanted.attr_set = attributes;
    // SAFETY: an open descriptor, an empty string and a structure of the given size.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            copy.as_raw_fd(),
            c"".as_ptr(),
            range,
            &raw const wanted,
            size_of::<libc::mount_attr>(),
        )
    };
    match result {
        0 => Ok(copy),
        // SAFETY: the address of this thread's error number, set by the call before.
        _ => Err(Errno::from_raw_os_error(unsafe {
            *libc::__errno_location()
        })),
    }
}

/// Moves this process, which has one thread, into a new user namespace, in which it has all
/// capabilities over new mounts and none over the host, and into a new mount namespace.
///
/// # Errors
///
/// If unshare(2) fails: such as `EPERM` if the host does not allow user namespaces, `EINVAL` if the
/// process has further threads.
pub fn enter_namespace() -> Result<(), Errno> {
    // SAFETY: the table of descriptors stays shared.
    unsafe { unshare_unsafe(UnshareFlags::NEWUSER | UnshareFlags::NEWNS) }
}
