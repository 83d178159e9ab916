//! Makes the node's data folder.

use crate::data::{DISK, FOLDER, MKFS, RAM_DISK_MODULE};
use crate::disk::COLD_FILE;
use anyhow::{Context, Result, bail};
use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

/// Size of a RAM disk. It takes memory as it is written.
const DISK_KIB: u32 = 512 << 10;

const LOOP_DISK: &str = "/dev/loop0";

/// Mounts the folder, unless an earlier case has done so.
///
/// # Errors
///
/// If there is no disk for it, or mkfs.xfs or `mount` fails.
pub fn mount() -> Result<()> {
    if fs::read_to_string("/proc/mounts")?.contains(&format!(" {FOLDER} ")) {
        return Ok(());
    }
    let disk = match Path::new("/proc/modules").exists() {
        true => {
            load_ram_disks()?;
            DISK
        }
        false => loop_disk()?,
    };
    run(Command::new(MKFS).args(["-q", "-m", "reflink=1", disk]))?;
    fs::create_dir_all(FOLDER)?;
    run(Command::new("mount").args(["-t", "xfs", disk, FOLDER]))
}

/// A disk in a file in memory, for a kernel without modules, which has no RAM disk.
fn loop_disk() -> Result<&'static str> {
    let path = "/bench/data.img";
    File::create(path)?.set_len(u64::from(DISK_KIB) << 10)?;
    run(Command::new("losetup").args([LOOP_DISK, path]))?;
    Ok(LOOP_DISK)
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
