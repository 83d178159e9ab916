//! Files that appear whole under their name, or not at all.
//!
//! A file is written as `.NAME.RANDOM.tmp` beside its place and is locked
//! (flock) while its writer lives, so that a collector can tell what a dead
//! writer left behind.

use crate::error::WriteError;
use jiffy_sys::locked::Locked;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// A file on its way. Dropped before [`Temporary::commit`], it is removed.
#[derive(Debug)]
pub struct Temporary {
    file: Locked,
    path: PathBuf,
    target: PathBuf,
    done: bool,
}

/// What happens to a file that has the target's name already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Existing {
    /// It is replaced.
    Replace,
    /// It stays, and the commit fails.
    Keep,
}

impl Temporary {
    /// Begins a file that shall be called `target`, mode 0644.
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
            let file = match created {
                Ok(file) => file,
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(error),
            };
            let file = Locked::exclusive(file).inspect_err(|_| {
                let _ = fs::remove_file(&path);
            })?;
            let temporary = Temporary {
                file,
                path,
                target: target.to_owned(),
                done: false,
            };
            // A collector may have come between creation and lock.
            if temporary.file.metadata()?.nlink() > 0 {
                return Ok(temporary);
            }
        }
    }

    /// The file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Says what went wrong with the file.
    pub fn failed(&self, source: io::Error) -> WriteError {
        WriteError::Target {
            path: self.target.clone(),
            source,
        }
    }

    /// Syncs the file, gives it its name, and syncs the folder.
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

/// Whether a file of this name is one on its way.
pub fn is_temporary(name: &str) -> bool {
    name.strip_prefix('.')
        .and_then(|name| name.strip_suffix(".tmp"))
        .and_then(|name| name.rsplit_once('.'))
        .is_some_and(|(_, random)| {
            random.len() == 16 && random.bytes().all(|byte| byte.is_ascii_hexdigit())
        })
}

/// Removes a file if nobody holds it: neither its writer, nor, for an image,
/// a reader. `still_wanted` is asked once nobody can come any more. Says
/// whether the file is gone.
pub(crate) fn remove_unheld(
    path: &Path,
    still_wanted: impl FnOnce() -> io::Result<bool>,
) -> io::Result<bool> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
        Err(error) => return Err(error),
    };
    let Some(file) = Locked::alone(file)? else {
        return Ok(false);
    };
    // Another file may have taken the name before the lock was had.
    let named = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
        Err(error) => return Err(error),
    };
    let held = file.metadata()?;
    if (named.dev(), named.ino()) != (held.dev(), held.ino()) || still_wanted()? {
        return Ok(false);
    }
    fs::remove_file(path)?;
    Ok(true)
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
        assert!(is_temporary(name), "{name}");
        let path = folder.path().join(name);
        assert!(
            !remove_unheld(&path, || Ok(false)).unwrap(),
            "its writer lives"
        );
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

    #[test]
    fn only_names_of_ours_are_temporary() {
        for name in [
            "a.image",
            ".a.image.tmp",
            "a.0123456789abcdef.tmp",
            ".x.123.tmp",
        ] {
            assert!(!is_temporary(name), "{name}");
        }
    }
}
