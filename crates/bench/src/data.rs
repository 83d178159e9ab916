//! The node's data folder in the machine: an XFS on a RAM disk.
//!
//! Users' data is on a file system with a page cache of its own, and the node uses that: a golden
//! run maps the pages that an earlier one accessed (docs/ahead.md). On a tmpfs it can't tell them,
//! and a real disk would add its own, varying time.

use crate::host_files::{addition, kernel_modules, with_libraries};
use anyhow::Result;
use jiffy_machine::image::build::Addition;
use std::path::Path;

/// In the machine: the folder.
pub const FOLDER: &str = "/var/lib/jiffy";
/// In the machine: the RAM disk of its file system.
pub const DISK: &str = "/dev/ram1";
/// In the machine: module for RAM disks.
pub const RAM_DISK_MODULE: &str = "/bench/brd.ko";
/// In the machine: mkfs.xfs.
pub const MKFS: &str = "/bench/mkfs.xfs";

/// Files that the folder needs in the machine.
///
/// # Errors
///
/// If this host has no mkfs.xfs, the machine's kernel has no module `brd`, or a file can't be
/// written.
pub fn additions(scratch: &Path) -> Result<Vec<Addition>> {
    let mut additions = with_libraries(&jiffy_machine::disk::find_mkfs()?, MKFS)?;
    for module in kernel_modules(&["brd"])? {
        let path = scratch.join("brd.ko");
        std::fs::write(&path, &module.contents)?;
        additions.push(addition(path, RAM_DISK_MODULE));
    }
    Ok(additions)
}
