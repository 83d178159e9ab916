//! The id of this boot, `/proc/sys/kernel/random/boot_id`.
//!
//! The kernel generates it at the first read and never changes it. A restored guest gets another
//! one by a bind mount over the file.

use crate::files;
use crate::program::prepare::reason;
use alloc::format;
use alloc::string::String;
use core::ffi::CStr;
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount_bind, mount_remount, unmount};

const KERNEL_FILE: &CStr = c"/proc/sys/kernel/random/boot_id";
const REPLACEMENT: &CStr = c"/run/jiffy-boot-id";

/// Sets the boot id.
///
/// # Errors
///
/// If the file with the new id can't be created or mounted.
pub fn replace(id: &str) -> Result<(), String> {
    let content = format!("{id}\n");
    let mounted_over = || -> Result<(), Errno> {
        // The bind mount of the previous generation, if there was one.
        let _ = unmount(KERNEL_FILE, UnmountFlags::DETACH);
        let _ = rustix::fs::unlink(REPLACEMENT);
        files::create(REPLACEMENT, content.as_bytes(), 0o444)?;
        let mounted = mount_bind(REPLACEMENT, KERNEL_FILE).and_then(|()| {
            mount_remount(
                KERNEL_FILE,
                MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NOEXEC,
                c"",
            )
        });
        // Unlinked after the mount, so that no program can open it for writing.
        let _ = rustix::fs::unlink(REPLACEMENT);
        mounted
    };
    mounted_over().map_err(|error| format!("it cannot be replaced: {}", reason(error)))
}
