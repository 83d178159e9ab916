//! Mounts further disks and enables swap.

use super::mounts::Teardown;
use crate::program::prepare::{path_c_string, reason};
use crate::report::Report;
use crate::{files, syscalls};
use alloc::{format, string::String, vec::Vec};
use jiffy_wire::guest::DiskMount;
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount};
use rustix::thread::{Timespec, nanosleep};

/// Time limit for a disk to appear, nanoseconds.
const TIMEOUT_NS: u64 = 5_000_000_000;

/// Mounts the disks that exist. Returns those that have not appeared yet, so that other steps run
/// meanwhile.
pub fn mount_present<'a>(
    disks: &'a [DiskMount],
    teardown: &mut Teardown,
    report: &mut Report,
) -> Vec<&'a DiskMount> {
    let mut late = Vec::new();
    for (index, disk) in disks.iter().enumerate() {
        // The order matters, because one may be mounted inside another.
        if !late.is_empty() || !files::exists(disk.device.as_str()) {
            late.extend(&disks[index..]);
            break;
        }
        mount_disk(disk, teardown, report);
    }
    late
}

/// Waits for the remaining disks and mounts them.
pub fn mount_late(disks: Vec<&DiskMount>, teardown: &mut Teardown, report: &mut Report) {
    for disk in disks {
        mount_disk(disk, teardown, report);
    }
}

fn mount_disk(disk: &DiskMount, teardown: &mut Teardown, report: &mut Report) {
    let mounted = report.required_step(&format!("disk {}", disk.mount_point), |_| {
        let DiskMount {
            device,
            fstype,
            mount_point,
            read_only,
        } = disk;
        if !mount_point.starts_with('/') {
            return Err(format!(
                "the mount point {mount_point:?} of {device} is not an absolute path"
            ));
        }
        if !wait_for(device, TIMEOUT_NS) {
            return Err(format!(
                "{device} did not appear within {} s",
                TIMEOUT_NS / 1_000_000_000
            ));
        }
        files::make_folders(mount_point, 0o755)
            .map_err(|error| format!("{mount_point} cannot be created: {}", reason(error)))?;
        let flags = if *read_only {
            MountFlags::RDONLY
        } else {
            MountFlags::empty()
        };
        mount(
            device.as_str(),
            mount_point.as_str(),
            fstype.as_str(),
            flags,
            c"",
        )
        .map_err(|error| {
            format!(
                "{device} cannot be mounted as {fstype} on {mount_point}: {}",
                reason(error)
            )
        })
    });
    if mounted.is_none() || disk.read_only {
        return;
    }
    teardown.writable_disks = true;
    if disk.fstype == "ext4"
        && let Err(error) = fill(&disk.device, &disk.mount_point)
    {
        let message = format!(
            "{} is larger than its file system, which cannot grow: {}",
            disk.device,
            reason(error)
        );
        report.warn("disk", &message);
    }
}

/// Grows a mounted ext4 file system to the size of its disk.
fn fill(device: &str, mount_point: &str) -> Result<(), Errno> {
    /// A smaller difference is ignored.
    const LEAST_BLOCKS: u64 = 1024;
    let disk = files::open(device)?;
    let mut superblock = [0; 1024];
    if rustix::io::pread(&disk, &mut superblock, 1024)? != superblock.len() {
        return Ok(());
    }
    let field = |offset: usize| {
        let bytes = [0, 1, 2, 3].map(|byte| superblock[offset + byte]);
        u64::from(u32::from_le_bytes(bytes))
    };
    // Documentation/filesystems/ext4/super.rst: number of blocks (low and high half) and their
    // size. With 32-bit block numbers the high half is not used.
    let high = match field(0x60) & 0x80 {
        0 => 0,
        _ => field(0x150),
    };
    let blocks = high << 32 | field(0x4);
    let shift = field(0x18).min(6);
    let wanted = syscalls::device_bytes(&disk)? / (1024 << shift);
    if wanted < blocks.saturating_add(LEAST_BLOCKS) {
        return Ok(());
    }
    syscalls::grow_ext4(&files::open(mount_point)?, wanted)
}

/// Waits until a device file exists.
pub fn wait_for(device: &str, timeout_ns: u64) -> bool {
    if files::exists(device) {
        return true;
    }
    let give_up = syscalls::monotonic_ns() + timeout_ns;
    let mut pause_ns = 200_000;
    while syscalls::monotonic_ns() < give_up {
        let _ = nanosleep(&Timespec {
            tv_sec: 0,
            tv_nsec: pause_ns,
        });
        if files::exists(device) {
            return true;
        }
        pause_ns = (pause_ns * 2).min(10_000_000);
    }
    false
}

/// Waits for a device or file and swaps to it.
///
/// # Errors
///
/// If the path does not appear in time, or the kernel refuses it.
pub fn swap_on(path: &str) -> Result<(), String> {
    if !wait_for(path, TIMEOUT_NS) {
        return Err(format!("{path} does not exist"));
    }
    path_c_string(path)
        .and_then(|path| syscalls::swapon(&path))
        .map_err(|error| format!("{path} cannot be used for swap: {}", reason(error)))
}
