//! Mounts the root file system, makes it `/`, and frees the initramfs's memory.

use super::disks;
use super::mounts::{self, LOWER, UPPER};
use crate::files;
use crate::program::prepare::reason;
use crate::report::Report;
use crate::syscalls;
use alloc::{format, string::String};
use jiffy_wire::guest::Root;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, Dir, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount};

const NEW_ROOT: &str = "/new";

/// Time limit for the root's disk to appear, nanoseconds.
const TIMEOUT_NS: u64 = 10_000_000_000;

/// Makes the configured root `/`. If that fails, the initramfs stays the root.
pub fn enter(root: &Root, teardown: &mut mounts::Teardown, report: &mut Report) {
    if *root == Root::Initramfs {
        return;
    }
    if report
        .required_step("root", |_| mount_root(root, teardown))
        .is_none()
    {
        return;
    }
    report.required_step("switch root", |report| {
        if let Err(message) = mounts::move_into(NEW_ROOT) {
            report.warn("switch root", &message);
        }
        let initramfs =
            switch().map_err(|error| format!("cannot enter the root: {}", reason(error)))?;
        let device = rustix::fs::fstat(&initramfs).map(|status| status.st_dev);
        if let Ok(device) = device {
            empty(initramfs.as_fd(), device, 0);
        }
        teardown.initramfs = Some(initramfs);
        Ok(())
    });
}

/// The overlay's writable layer, in an initramfs that is covered by the root.
///
/// # Errors
///
/// If the root is no overlay with a layer in the initramfs (`ENOENT`), or `openat` fails for
/// another reason.
pub fn upper_layer(initramfs: &OwnedFd) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(initramfs, c"upper/data", flags, Mode::empty())
}

fn mount_root(root: &Root, teardown: &mut mounts::Teardown) -> Result<(), String> {
    make(NEW_ROOT)?;
    match root {
        Root::Initramfs => Ok(()),
        Root::Disk {
            device,
            fstype,
            read_only,
        } => {
            mount_device(device, NEW_ROOT, fstype, *read_only)?;
            teardown.writable_disks |= !read_only;
            Ok(())
        }
        Root::Overlay {
            device,
            fstype,
            upper,
        } => {
            make(LOWER)?;
            make(UPPER)?;
            mount_device(device, LOWER, fstype, true)?;
            read_ahead(device);
            match upper {
                Some((device, fstype)) => {
                    mount_device(device, UPPER, fstype, false)?;
                    teardown.writable_disks = true;
                }
                None => mount(c"tmpfs", UPPER, c"tmpfs", MountFlags::empty(), c"mode=0755")
                    .map_err(|error| format!("memory for the upper layer: {}", reason(error)))?,
            }
            make("/upper/data")?;
            make("/upper/work")?;
            mount(
                c"overlay",
                NEW_ROOT,
                c"overlay",
                MountFlags::empty(),
                c"lowerdir=/lower,upperdir=/upper/data,workdir=/upper/work",
            )
            .map_err(|error| format!("the overlay over {device}: {}", reason(error)))
        }
    }
}

fn make(path: &str) -> Result<(), String> {
    files::make_folder(path, 0o755).map_err(|error| format!("{path}: {}", reason(error)))
}

/// Waits for a device and mounts it.
fn mount_device(device: &str, target: &str, fstype: &str, read_only: bool) -> Result<(), String> {
    if !disks::wait_for(device, TIMEOUT_NS) {
        return Err(format!(
            "{device} did not appear within {} s",
            TIMEOUT_NS / 1_000_000_000
        ));
    }
    let flags = if read_only {
        MountFlags::RDONLY
    } else {
        MountFlags::empty()
    };
    mount(device, target, fstype, flags, c"")
        .map_err(|error| format!("{device} cannot be mounted as {fstype}: {}", reason(error)))
}

/// Sets the device's readahead: a request costs the host a few VM exits and two context switches,
/// and an additional page in it very little.
fn read_ahead(device: &str) {
    const SECTORS: usize = 1024;
    if let Ok(device) = files::open(device) {
        let _ = syscalls::set_read_ahead(&device, SECTORS);
    }
}

/// Makes [`NEW_ROOT`] the root of everything. The initramfs cannot be
/// unmounted, only covered (the kernel's
/// Documentation/filesystems/ramfs-rootfs-initramfs.rst); returns it.
fn switch() -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let initramfs = rustix::fs::open(c"/", flags, Mode::empty())?;
    rustix::process::chdir(NEW_ROOT)?;
    rustix::mount::mount_move(c".", c"/")?;
    rustix::process::chroot(c".")?;
    rustix::process::chdir(c"/")?;
    Ok(initramfs)
}

/// Deletes the contents of the initramfs; other file systems mounted in it stay.
fn empty(folder: BorrowedFd<'_>, device: u64, depth: u32) {
    const DEEPEST: u32 = 64;
    let Ok(entries) = Dir::read_from(folder) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        if entry.file_type() != rustix::fs::FileType::Directory {
            let _ = rustix::fs::unlinkat(folder, name, AtFlags::empty());
            continue;
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let Ok(below) = rustix::fs::openat(folder, name, flags, Mode::empty()) else {
            continue;
        };
        let same = rustix::fs::fstat(&below).is_ok_and(|status| status.st_dev == device);
        if same && depth < DEEPEST {
            empty(below.as_fd(), device, depth + 1);
            let _ = rustix::fs::unlinkat(folder, name, AtFlags::REMOVEDIR);
        }
    }
}
