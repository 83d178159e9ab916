//! Self-confinement of a process that serves one folder to someone it doesn't trust.
//!
//! Landlock alone is not enough for it: it does not know `chmod`, `chown`, `utimensat` and
//! attributes, and the process may have root's rights over files. So the process also gets a mount
//! of that folder alone as its root, from which nothing else has a name.

use crate::confine::{ConfineError, failed, harden, keep, restrict_to};
use crate::mounts::{self, HARMLESS};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{chroot, fchdir};
use rustix::thread::{
    CapabilitiesSecureBits, CapabilitySet, set_capabilities_secure_bits, set_thread_groups,
};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

/// What root needs to act on files as any user.
pub const FOR_FILES: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::SETGID);

/// A confined process's folder.
#[derive(Debug)]
pub struct Rooted {
    /// The folder (`O_PATH`); `..` of it is the folder itself unless `no_own_root` is set.
    pub folder: OwnedFd,
    /// The process's own descriptors (`/proc/self/fd`, `O_PATH`).
    pub descriptors: OwnedFd,
    /// Why the folder is not the root of this process: the host allows neither mounts nor user
    /// namespaces.
    pub no_own_root: Option<io::Error>,
    /// Whether the kernel has Landlock.
    pub has_landlock: bool,
}

/// Confines this process, which must have one thread, to a folder: hardens it, makes the folder its
/// root, drops its capabilities, and restricts it by Landlock. With `users`, a root process keeps
/// [`FOR_FILES`], also after it changes its effective user. Nothing in the folder can be executed,
/// and no device opened.
///
/// # Errors
///
/// If neither a mount of the folder nor the folder itself can be opened, if [`harden`] fails, if
/// groups or capabilities can't be dropped, or if the kernel refuses the Landlock rules. The
/// process may be confined in part then. A host that allows no root of its own is no error
/// ([`Rooted::no_own_root`]).
pub fn confine(
    folder: BorrowedFd<'_>,
    read_only: bool,
    users: bool,
) -> Result<Rooted, ConfineError> {
    let (rooted, why_not) = match own_root(folder, read_only) {
        Ok(both) => (both, None),
        Err(why) => {
            let both = both_of_the_host(folder).map_err(failed("opening the folder"))?;
            (both, Some(why.into()))
        }
    };
    let (folder, descriptors) = rooted;
    harden()?;
    if users {
        set_thread_groups(&[]).map_err(failed("leaving the groups"))?;
        let locked = CapabilitiesSecureBits::NO_SETUID_FIXUP
            | CapabilitiesSecureBits::NO_SETUID_FIXUP_LOCKED
            | CapabilitiesSecureBits::NO_ROOT
            | CapabilitiesSecureBits::NO_ROOT_LOCKED;
        set_capabilities_secure_bits(locked).map_err(failed("keeping capabilities"))?;
        keep(FOR_FILES)?;
    } else {
        keep(CapabilitySet::empty())?;
    }
    let has_landlock = restrict_to(&folder, read_only)?;
    Ok(Rooted {
        folder,
        descriptors,
        no_own_root: why_not,
        has_landlock,
    })
}

/// Makes a mount of the folder the root, and clones that of the process's own descriptors.
fn own_root(folder: BorrowedFd<'_>, read_only: bool) -> Result<(OwnedFd, OwnedFd), Errno> {
    let (user, group) = (
        rustix::process::geteuid().as_raw(),
        rustix::process::getegid().as_raw(),
    );
    // A new namespace has mounts of its own, and the working directory is in them.
    fchdir(folder)?;
    if user != 0 {
        mounts::enter_namespace()?;
        write("/proc/self/setgroups", "deny")?;
        write("/proc/self/uid_map", &format!("{user} {user} 1"))?;
        write("/proc/self/gid_map", &format!("{group} {group} 1"))?;
    }
    let attributes = match read_only {
        true => HARMLESS | libc::MOUNT_ATTR_RDONLY,
        false => HARMLESS,
    };
    let root = mounts::detached(rustix::fs::CWD, c".", true, attributes)?;
    let descriptors = mounts::detached(rustix::fs::CWD, c"/proc/self/fd", false, HARMLESS)?;
    fchdir(&root)?;
    chroot(c".")?;
    Ok((root, descriptors))
}

fn both_of_the_host(folder: BorrowedFd<'_>) -> Result<(OwnedFd, OwnedFd), Errno> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let descriptors = rustix::fs::open(c"/proc/self/fd", flags, Mode::empty())?;
    let folder = rustix::fs::openat(folder, c".", flags, Mode::empty())?;
    Ok((folder, descriptors))
}

fn write(path: &str, text: &str) -> Result<(), Errno> {
    let file = rustix::fs::open(path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::io::write(&file, text.as_bytes()).map(drop)
}
