//! A file that one process or thread completes while the others wait for it.

use crate::error::Result;
use crate::{Progress, RegistryError};
use jiffy_sys::locked::try_lock_exclusive;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

/// How often the lock is tried.
const POLL: Duration = Duration::from_millis(50);

/// Opens or creates a file, readable and writable by its user, and locks it; waits while another
/// has the lock. The lock is released with the file, or when the process ends.
///
/// `None` if `done` became true while waiting.
pub(crate) fn open_locked(
    path: &Path,
    what: &str,
    progress: &dyn Progress,
    done: &dyn Fn() -> bool,
) -> Result<Option<File>> {
    loop {
        if done() {
            return Ok(None);
        }
        let file = open(path).map_err(|error| RegistryError::file("open", path, error))?;
        if try_lock_exclusive(&file).map_err(|error| RegistryError::file("lock", path, error))? {
            // The previous owner of the lock may have renamed or removed the file.
            if is_at(&file, path) {
                if done() {
                    let _ = std::fs::remove_file(path);
                    return Ok(None);
                }
                return Ok(Some(file));
            }
            continue;
        }
        if progress.cancelled() {
            return Err(RegistryError::Cancelled {
                what: what.to_owned(),
            });
        }
        std::thread::sleep(POLL);
    }
}

/// Whether the path still names this file.
pub(crate) fn is_at(file: &File, path: &Path) -> bool {
    let same = || -> io::Result<bool> {
        let (ours, there) = (file.metadata()?, std::fs::symlink_metadata(path)?);
        Ok((ours.dev(), ours.ino()) == (there.dev(), there.ino()))
    };
    same().unwrap_or(false)
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32)
        .open(path)
}
