//! Makes the node's data folder.

use crate::data::{DISK, FOLDER, MKFS, RAM_DISK_MODULE};
use crate::disk::COLD_FILE;
use anyhow::{Context, Result, bail};
use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

/// Size of a RAM disk. It takes memory as it is written.
const DISK_KIB: u32 = 512 << 10;

/// Mounts the folder, unless an earlier case has done so.
pub fn mount() -> Result<()> {
    if fs::read_to_string("/proc/mounts")?.contains(&format!(" {FOLDER} ")) {
        return Ok(());
    }
    load_ram_disks()?;
    run(Command::new(MKFS).args(["-q", "-m", "reflink=1", DISK]))?;
    fs::create_dir_all(FOLDER)?;
    run(Command::new("mount").args(["-t", "xfs", DISK, FOLDER]))
}

/// Creates the RAM disk of the folder and one for cold reads.
fn load_ram_disks() -> Result<()> {
    let size = format!("rd_size={DISK_KIB}");
    run(Command::new("insmod").args([RAM_DISK_MODULE, "rd_nr=2", &size]))?;
    for disk in [DISK, COLD_FILE] {
        File::open(Path::new(disk)).context(disk)?;
    }
    Ok(())
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("{command:?}"))?;
    if !output.status.success() {
        let message = String::from_utf8_lossy(&output.stderr);
        bail!("{command:?}: {}", message.trim());
    }
    Ok(())
}
