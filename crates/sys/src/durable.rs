//! Atomic, durable replacement of files.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Replaces `path` by a file with these contents: written beside it under a
/// temporary name (`.NAME.PID.NUMBER.tmp`, mode 0644), synced, renamed, and
/// the folder synced. After a crash there is the old file or the new one.
///
/// # Errors
///
/// `InvalidInput` if `path` has no file name. If the file can't be written, synced or renamed: then
/// the old one stays. If the folder can't be synced: then the new file is there, but a crash may
/// undo that.
pub fn replace(path: &Path, contents: &[u8]) -> io::Result<()> {
    replace_with(path, contents, 0o644)
}

/// Like [`replace`], with mode 0600.
///
/// # Errors
///
/// As for [`replace`].
pub fn replace_private(path: &Path, contents: &[u8]) -> io::Result<()> {
    replace_with(path, contents, 0o600)
}

fn replace_with(path: &Path, contents: &[u8], mode: u32) -> io::Result<()> {
    let temporary = temporary_name(path)?;
    let written =
        write_synced(&temporary, contents, mode).and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
        return written;
    }
    sync_folder_of(path)
}

/// Removes a file, if it exists.
///
/// # Errors
///
/// If unlink(2) fails, except because the file does not exist.
pub fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Removes a file, a link, or a folder with its contents, if it exists.
///
/// # Errors
///
/// If it can't be examined or removed; a folder may have lost a part of its contents then.
pub fn remove_any(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(data) if data.is_dir() => fs::remove_dir_all(path),
        Ok(_) => remove(path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// Whether the disk, or the quota on it, is used up.
pub fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
    )
}

/// Syncs the folder of `path`, so that a rename or removal survives a crash.
///
/// # Errors
///
/// If the folder can't be opened, or fsync(2) fails.
pub fn sync_folder_of(path: &Path) -> io::Result<()> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    File::open(folder)?.sync_all()
}

fn temporary_name(path: &Path) -> io::Result<PathBuf> {
    // A number per call, because threads may replace the same file at once.
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let name = path
        .file_name()
        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
    let mut temporary = OsString::from(".");
    temporary.push(name);
    temporary.push(format!(".{}.{number}.tmp", std::process::id()));
    Ok(path.with_file_name(temporary))
}

fn write_synced(path: &Path, contents: &[u8], mode: u32) -> io::Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(mode)
        .open(path)?;
    file.write_all(contents)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replacing_a_file_leaves_no_temporary() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("exit.json");
        replace(&path, b"one").unwrap();
        replace(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_failed_replacement_leaves_the_old_file_and_no_temporary() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("taken");
        fs::create_dir(&path).unwrap();
        fs::write(path.join("inside"), b"kept").unwrap();
        replace(&path, b"new").unwrap_err();
        assert_eq!(fs::read(path.join("inside")).unwrap(), b"kept");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
