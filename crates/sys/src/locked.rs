//! Files that are locked (flock) as long as they are open, and no longer.
//!
//! A lock is the open file's, and a child has its parent's files open from fork
//! to exec. Closed alone, a file that another thread's child has too would stay
//! locked for a moment, and who comes next would be told that it is in use.

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Deref;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// A locked file. The lock ends when this is dropped, if not before, whoever else has the
/// file.
#[derive(Debug)]
pub struct Locked {
    file: File,
    /// Whether the lock is ours to end.
    is_ours: bool,
}

impl Locked {
    /// Somebody else's, with whatever lock that has on it.
    pub fn by_others(file: File) -> Locked {
        Locked {
            file,
            is_ours: false,
        }
    }

    /// Locks it with others; waits for who has it alone.
    pub fn shared(file: File) -> io::Result<Locked> {
        wait_for(&file, FlockOperation::LockShared)?;
        Ok(Locked::by_us(file))
    }

    /// Locks it alone; waits for who has it.
    pub fn exclusive(file: File) -> io::Result<Locked> {
        wait_for(&file, FlockOperation::LockExclusive)?;
        Ok(Locked::by_us(file))
    }

    /// Locks it alone; `None` if somebody has it.
    pub fn alone(file: File) -> io::Result<Option<Locked>> {
        Ok(lock_alone(&file)?.then(|| Locked::by_us(file)))
    }

    /// Ends the lock, if it is ours, before the file is closed.
    pub fn unlock(&self) {
        if self.is_ours {
            // Else it ends when the last one closes the file.
            let _ = flock(&self.file, FlockOperation::Unlock);
        }
    }

    fn by_us(file: File) -> Locked {
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

/// Opens a file that is there to be locked, and made if it is not.
pub fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
}

/// Locks a file until its last holder closes it; false if somebody has it locked.
pub fn lock_alone(file: &File) -> io::Result<bool> {
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
    fn it_ends_though_others_have_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let locked = Locked::exclusive(File::create(&path).unwrap()).unwrap();
        let of_a_child = locked.try_clone().unwrap();
        assert!(Locked::alone(File::open(&path).unwrap()).unwrap().is_none());
        drop(locked);
        assert!(Locked::alone(File::open(&path).unwrap()).unwrap().is_some());
        let locked = Locked::shared(of_a_child).unwrap();
        let _of_another = locked.try_clone().unwrap();
        drop(locked);
        assert!(Locked::alone(File::open(&path).unwrap()).unwrap().is_some());
    }
}
