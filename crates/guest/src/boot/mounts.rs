//! Mounts the kernel's file systems, and unmounts everything at the end.

use crate::files;
use crate::program::prepare::reason;
use crate::syscalls;
use alloc::{format, string::String, vec::Vec};
use core::ffi::CStr;
use rustix::fd::OwnedFd;
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// Where the image below an overlay is mounted, in the initramfs.
pub const LOWER: &str = "/lower";
/// Where an overlay's writable layer is mounted, in the initramfs.
pub const UPPER: &str = "/upper";

struct Mount {
    kind: &'static CStr,
    target: &'static CStr,
    flags: MountFlags,
    options: &'static CStr,
}

const PLAIN: MountFlags = MountFlags::NOSUID
    .union(MountFlags::NOEXEC)
    .union(MountFlags::NODEV);

const KERNEL: [Mount; 3] = [
    Mount {
        kind: c"devtmpfs",
        target: c"/dev",
        flags: MountFlags::NOSUID,
        options: c"mode=0755",
    },
    Mount {
        kind: c"proc",
        target: c"/proc",
        flags: PLAIN,
        options: c"",
    },
    Mount {
        kind: c"sysfs",
        target: c"/sys",
        flags: PLAIN,
        options: c"",
    },
];

const IN_ROOT: [Mount; 4] = [
    Mount {
        kind: c"devpts",
        target: c"/dev/pts",
        flags: MountFlags::NOSUID.union(MountFlags::NOEXEC),
        options: c"gid=5,mode=620,ptmxmode=666",
    },
    Mount {
        kind: c"tmpfs",
        target: c"/dev/shm",
        flags: MountFlags::NOSUID.union(MountFlags::NODEV),
        options: c"mode=1777",
    },
    Mount {
        kind: c"tmpfs",
        target: c"/run",
        flags: MountFlags::NOSUID.union(MountFlags::NODEV),
        options: c"mode=0755",
    },
    Mount {
        kind: c"tmpfs",
        target: c"/tmp",
        flags: MountFlags::NOSUID.union(MountFlags::NODEV),
        options: c"mode=1777",
    },
];

/// Links in /dev that programs expect.
const LINKS: [(&CStr, &CStr); 4] = [
    (c"/proc/self/fd", c"/dev/fd"),
    (c"/proc/self/fd/0", c"/dev/stdin"),
    (c"/proc/self/fd/1", c"/dev/stdout"),
    (c"/proc/self/fd/2", c"/dev/stderr"),
];

/// Mounts /dev, /proc and /sys; then opens missing standard descriptors.
///
/// # Errors
///
/// If a mount fails; the others are made.
pub fn mount_kernel_file_systems() -> Result<(), String> {
    let result = mount_all(&KERNEL);
    open_standard_descriptors();
    result
}

/// Mounts /dev/pts, /dev/shm, /run and /tmp and creates the links in /dev.
///
/// # Errors
///
/// If a mount fails; the others are made.
pub fn mount_in_root() -> Result<(), String> {
    for (target, link) in LINKS {
        // An existing link is kept.
        let _ = rustix::fs::symlink(target, link);
    }
    mount_all(&IN_ROOT)
}

/// Moves /dev, /proc and /sys below `new_root`.
///
/// # Errors
///
/// If a move fails; the others are made.
pub fn move_into(new_root: &str) -> Result<(), String> {
    let mut failures = Vec::new();
    for entry in &KERNEL {
        let source = entry.target.to_string_lossy();
        let target = format!("{new_root}{source}");
        let moved = match rustix::mount::mount_move(entry.target, target.as_str()) {
            Err(Errno::NOENT) => files::make_folder(target.as_str(), 0o755)
                .and_then(|()| rustix::mount::mount_move(entry.target, target.as_str())),
            other => other,
        };
        if let Err(error) = moved {
            failures.push(format!("{source}: {}", reason(error)));
        }
    }
    summary(failures)
}

fn mount_all(list: &[Mount]) -> Result<(), String> {
    let mut failures = Vec::new();
    for entry in list {
        if let Err(error) = mount_one(entry) {
            failures.push(format!(
                "{}: {}",
                entry.target.to_string_lossy(),
                reason(error)
            ));
        }
    }
    summary(failures)
}

fn summary(failures: Vec<String>) -> Result<(), String> {
    if failures.is_empty() {
        Ok(())
    } else {
        Err(failures.join("; "))
    }
}

fn mount_one(entry: &Mount) -> Result<(), Errno> {
    let attempt = || {
        mount(
            entry.kind,
            entry.target,
            entry.kind,
            entry.flags,
            entry.options,
        )
    };
    match attempt() {
        Err(Errno::NOENT) => {
            files::make_folder(entry.target, 0o755)?;
            attempt()
        }
        // The kernel has mounted it already (CONFIG_DEVTMPFS_MOUNT).
        Err(Errno::BUSY) => Ok(()),
        other => other,
    }
}

/// Opens missing standard descriptors. A kernel without a console starts PID 1 without descriptors
/// 0 to 2, and files opened later would get these numbers.
fn open_standard_descriptors() {
    for fd in 0..3 {
        if !syscalls::is_open(fd) {
            let flags = OFlags::RDWR;
            // The lowest free number is `fd`; it stays open.
            if let Ok(null) = rustix::fs::open(c"/dev/null", flags, rustix::fs::Mode::empty()) {
                core::mem::forget(null);
            }
        }
    }
}

/// Opens the console, if there is one, as standard descriptors. The descriptors that the kernel
/// opened refer to a deleted file of the initramfs.
pub fn open_console() {
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    if let Ok(console) = rustix::fs::open(c"/dev/console", flags, rustix::fs::Mode::empty()) {
        for fd in 0..3 {
            let _ = syscalls::duplicate_to(&console, fd);
        }
    }
}

/// Mounts that must be undone before the power goes off.
#[derive(Debug, Default)]
pub struct Teardown {
    /// Whether a disk was mounted writable.
    pub writable_disks: bool,
    /// The initramfs, if another root covers it.
    pub initramfs: Option<OwnedFd>,
}

impl Teardown {
    /// Writes everything back and unmounts disks, or remounts them read-only if they are in use.
    pub fn run(self) {
        rustix::fs::sync();
        if !self.writable_disks {
            return;
        }
        let mut targets = mount_points();
        if let Some(initramfs) = &self.initramfs {
            // Goes back to the initramfs, so that the disks of the root can be unmounted as well.
            for target in targets.drain(..).rev() {
                if target != "/" {
                    unmount_or_remount(&target);
                }
            }
            let _ = rustix::mount::mount_remount(c"/", MountFlags::RDONLY, c"");
            let _ = rustix::process::chdir(c"/");
            let _ = unmount(c".", UnmountFlags::DETACH);
            let left =
                rustix::process::fchdir(initramfs).and_then(|()| rustix::process::chroot(c"."));
            if left.is_ok() {
                unmount_or_remount(UPPER);
                unmount_or_remount(LOWER);
            }
        } else {
            targets
                .into_iter()
                .rev()
                .for_each(|target| unmount_or_remount(&target));
        }
        rustix::fs::sync();
    }
}

fn unmount_or_remount(target: &str) {
    if unmount(target, UnmountFlags::empty()).is_err() {
        let _ = rustix::mount::mount_remount(target, MountFlags::RDONLY, c"");
    }
}

/// Mount points of file systems on disks, in mount order.
fn mount_points() -> Vec<String> {
    const LARGEST: usize = 1024 * 1024;
    let table = files::read_text(c"/proc/self/mounts", LARGEST).unwrap_or_default();
    parse_mounts(&table)
}

/// Mount points of this guest's writable disks. FUSE and similar file systems are left out, because
/// their server may be frozen and would never answer.
pub fn writable_disks() -> Vec<String> {
    const LARGEST: usize = 1024 * 1024;
    let table = files::read_text(c"/proc/self/mounts", LARGEST).unwrap_or_default();
    parse_writable(&table)
}

fn parse_writable(table: &str) -> Vec<String> {
    let lines = table.lines().filter_map(|line| {
        let mut fields = line.split(' ');
        let (device, target) = (fields.next()?, fields.next()?);
        let options = fields.nth(1)?;
        let writable = options.split(',').any(|option| option == "rw");
        (device.starts_with("/dev/vd") && writable).then(|| unescape(target))
    });
    lines.collect()
}

/// Parses `/proc/self/mounts`: device, target, type, …; spaces are octal escapes.
fn parse_mounts(table: &str) -> Vec<String> {
    table
        .lines()
        .filter_map(|line| {
            let mut fields = line.split(' ');
            let (device, target) = (fields.next()?, fields.next()?);
            (device.starts_with("/dev/") || target == "/").then(|| unescape(target))
        })
        .collect()
}

fn unescape(field: &str) -> String {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        let octal = tail.get(..3).filter(|_| byte == b'\\').and_then(|digits| {
            digits.iter().try_fold(0u32, |value, digit| {
                matches!(digit, b'0'..=b'7').then(|| value * 8 + u32::from(digit - b'0'))
            })
        });
        match octal.and_then(|value| u8::try_from(value).ok()) {
            Some(value) => {
                bytes.push(value);
                rest = &tail[3..];
            }
            None => {
                bytes.push(byte);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_disks_and_the_root_are_unmounted() {
        let table = "overlay / overlay rw 0 0\nproc /proc proc rw 0 0\n\
            /dev/vdb /var/lib/a\\040b xfs rw 0 0\ntmpfs /tmp tmpfs rw 0 0\n";
        assert_eq!(parse_mounts(table), ["/", "/var/lib/a b"]);
    }

    #[test]
    fn only_writable_local_disks_are_synced() {
        let table = "overlay / overlay rw 0 0\n/dev/vda /lower erofs ro,relatime 0 0\n\
            /dev/vdb /a\\040b ext4 rw,relatime 0 0\n/dev/nbd0 /n ext4 rw 0 0\nbroken\n";
        assert_eq!(parse_writable(table), ["/a b"]);
    }

    #[test]
    fn invalid_escapes_are_kept_unchanged() {
        assert_eq!(unescape("a\\04"), "a\\04");
        assert_eq!(unescape("a\\999b"), "a\\999b");
        assert_eq!(unescape("a\\134b"), "a\\b");
        assert_eq!(unescape("\\777"), "\\777");
    }
}
