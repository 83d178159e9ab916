//! Files that appear under their name only when they are complete.
//!
//! A file is written as `.NAME.RANDOM.tmp` in the folder of its target. The temporary file of a
//! killed process is removed with its folder, or when the folder's owner removes hidden files.

use crate::error::WriteError;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// A file that is being written. It is removed if it is dropped before [`Temporary::commit`].
#[derive(Debug)]
pub struct Temporary {
    file: File,
    path: PathBuf,
    target: PathBuf,
    done: bool,
}

/// What happens to an existing file with the target's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Existing {
    /// It is replaced.
    Replace,
    /// It stays, and the commit fails.
    Keep,
}

impl Temporary {
    /// Creates a file that is to be called `target`, mode 0644.
    ///
    /// # Errors
    ///
    /// If `target` has no file name, or the file can't be created.
    pub fn create(target: &Path) -> Result<Temporary, WriteError> {
        Temporary::begin(target).map_err(|source| WriteError::Target {
            path: target.to_owned(),
            source,
        })
    }

    fn begin(target: &Path) -> io::Result<Temporary> {
        let name = target
            .file_name()
            .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        loop {
            let mut random = [0; 8];
            rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
            let path = target.with_file_name(format!(
                ".{}.{:016x}.tmp",
                name.to_string_lossy(),
                u64::from_le_bytes(random)
            ));
            let created = OpenOptions::new()
                .read(true)
                .write(true)
                .create_new(true)
                .mode(0o644)
                .open(&path);
            match created {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
                Ok(file) => {
                    return Ok(Temporary {
                        file,
                        path,
                        target: target.to_owned(),
                        done: false,
                    });
                }
            }
        }
    }

    /// The file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The error of this file with that cause.
    pub fn failed(&self, source: io::Error) -> WriteError {
        WriteError::Target {
            path: self.target.clone(),
            source,
        }
    }

    /// Syncs the file, renames it to its target, and syncs the folder.
    ///
    /// # Errors
    ///
    /// If the file can't be synced or renamed, or exists already and is to stay
    /// ([`Existing::Keep`]).
    pub fn commit(mut self, existing: Existing) -> Result<(), WriteError> {
        self.finish(existing).map_err(|source| self.failed(source))
    }

    fn finish(&mut self, existing: Existing) -> io::Result<()> {
        self.file.sync_all()?;
        match existing {
            Existing::Replace => fs::rename(&self.path, &self.target)?,
            Existing::Keep => {
                renameat_with(CWD, &self.path, CWD, &self.target, RenameFlags::NOREPLACE)?;
            }
        }
        self.done = true;
        jiffy_sys::durable::sync_folder_of(&self.target)
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.done {
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_appears_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("a.image");
        let temporary = Temporary::create(&target).unwrap();
        temporary.file().write_all(b"half").unwrap();
        let [name] = &names(folder.path())[..] else {
            panic!("one file")
        };
        assert!(name.starts_with(".a.image."), "{name}");
        drop(temporary);
        assert_eq!(names(folder.path()), [""; 0]);

        let temporary = Temporary::create(&target).unwrap();
        temporary.commit(Existing::Keep).unwrap();
        assert_eq!(names(folder.path()), ["a.image"]);
        let second = Temporary::create(&target).unwrap();
        second.commit(Existing::Keep).unwrap_err();
        assert_eq!(names(folder.path()), ["a.image"]);
        let third = Temporary::create(&target).unwrap();
        third.file().write_all(b"new").unwrap();
        third.commit(Existing::Replace).unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"new");
    }
}
