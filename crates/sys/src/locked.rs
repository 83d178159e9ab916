//! Files locked with flock(2) until they are closed.
//!
//! The lock belongs to the open file description, which a child shares with its parent from fork to
//! exec. Closing the file may therefore leave it locked for a moment, so it is unlocked first.

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Deref;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// A locked file. Dropping it releases the lock, even if a child has the file open.
#[derive(Debug)]
pub struct Locked {
    file: File,
    /// Whether dropping releases the lock.
    is_ours: bool,
}

impl Locked {
    /// A file that another process has locked. Dropping this leaves the lock.
    pub fn held_elsewhere(file: File) -> Locked {
        Locked {
            file,
            is_ours: false,
        }
    }

    /// Takes a shared lock; waits for an exclusive holder.
    ///
    /// # Errors
    ///
    /// If flock(2) fails.
    pub fn shared(file: File) -> io::Result<Locked> {
        wait_for(&file, FlockOperation::LockShared)?;
        Ok(Locked::held_here(file))
    }

    /// Takes an exclusive lock; waits for other holders.
    ///
    /// # Errors
    ///
    /// If flock(2) fails.
    pub fn exclusive(file: File) -> io::Result<Locked> {
        wait_for(&file, FlockOperation::LockExclusive)?;
        Ok(Locked::held_here(file))
    }

    /// Takes an exclusive lock; `None` if another process holds one.
    ///
    /// # Errors
    ///
    /// If flock(2) fails for another reason.
    pub fn try_exclusive(file: File) -> io::Result<Option<Locked>> {
        Ok(try_lock_exclusive(&file)?.then(|| Locked::held_here(file)))
    }

    /// Releases the lock before the file is closed, if this process holds it.
    pub fn unlock(&self) {
        if self.is_ours {
            // If this fails, the lock ends when the last descriptor is closed.
            let _ = flock(&self.file, FlockOperation::Unlock);
        }
    }

    fn held_here(file: File) -> Locked {
        Locked {
            file,
            is_ours: true,
        }
    }
}

impl Deref for Locked {
    type Target = File;

    fn deref(&self) -> &File {
        &self.file
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        self.unlock();
    }
}

/// Opens a lock file; creates it with mode 0600 if it is missing.
///
/// # Errors
///
/// If the file can't be opened or created.
pub fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
}

/// Locks a file until all its descriptors are closed; false if it is locked already.
///
/// # Errors
///
/// If flock(2) fails for another reason.
pub fn try_lock_exclusive(file: &File) -> io::Result<bool> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn wait_for(file: &File, lock: FlockOperation) -> io::Result<()> {
    loop {
        match flock(file, lock) {
            Err(Errno::INTR) => {}
            result => return Ok(result?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropping_a_lock_unlocks_even_with_inherited_descriptors() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let locked = Locked::exclusive(File::create(&path).unwrap()).unwrap();
        let of_a_child = locked.try_clone().unwrap();
        assert!(
            Locked::try_exclusive(File::open(&path).unwrap())
                .unwrap()
                .is_none()
        );
        drop(locked);
        assert!(
            Locked::try_exclusive(File::open(&path).unwrap())
                .unwrap()
                .is_some()
        );
        let locked = Locked::shared(of_a_child).unwrap();
        let _of_another = locked.try_clone().unwrap();
        drop(locked);
        assert!(
            Locked::try_exclusive(File::open(&path).unwrap())
                .unwrap()
                .is_some()
        );
    }
}
