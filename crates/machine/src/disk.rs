//! The machine's data disk: a sparse file with an XFS file system.

use crate::error::MachineError;
use jiffy_sys::programs::on_path;
use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Creates the disk if it is missing: sparse, formatted, then renamed, so that an
/// incomplete disk is never used.
///
/// # Errors
///
/// If there is no mkfs.xfs or it fails, or the file can't be created.
pub fn ensure(path: &Path, size_gib: u32) -> Result<(), MachineError> {
    if path.exists() {
        return Ok(());
    }
    let mkfs = find_mkfs()?;
    let temporary = path.with_extension("img.tmp");
    let made = make(&mkfs, &temporary, size_gib).and_then(|()| {
        std::fs::rename(&temporary, path)
            .and_then(|()| jiffy_sys::durable::sync_folder_of(path))
            .map_err(|error| MachineError::file(path, error))
    });
    if made.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    made
}

/// Finds mkfs.xfs.
///
/// # Errors
///
/// If it is not on `PATH`.
pub fn find_mkfs() -> Result<PathBuf, MachineError> {
    on_path("mkfs.xfs").ok_or(MachineError::NoMkfs)
}

fn make(mkfs: &Path, path: &Path, size_gib: u32) -> Result<(), MachineError> {
    use std::os::unix::fs::OpenOptionsExt;
    let file: File = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)
        .map_err(|error| MachineError::file(path, error))?;
    file.set_len(u64::from(size_gib) << 30)
        .map_err(|error| MachineError::file(path, error))?;
    let output = Command::new(mkfs)
        .args(["-q", "-f", "-m", "reflink=1,bigtime=1", "-L", "jiffy"])
        .arg(path)
        .output()
        .map_err(|error| MachineError::file(mkfs, error))?;
    if !output.status.success() {
        let message = String::from_utf8_lossy(&output.stderr);
        return Err(MachineError::Format {
            path: path.into(),
            message: message.lines().last().unwrap_or("no reason given").into(),
        });
    }
    file.sync_all()
        .map_err(|error| MachineError::file(path, error))
}
