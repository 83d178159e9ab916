//! Open files that this process inherited, by the paths that its configuration uses.
//!
//! A jailed program can't open files. The process that starts it opens its files and passes the
//! descriptors. Code that opens a file looks here first ([`take`]); a process that inherited no
//! files opens them by path.

use crate::mutex::lock;
use rustix::fs::{Mode, OFlags};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

/// Path of this process's folder in procfs, which a jailed process inherits.
pub const PROC: &str = "/proc/self";
/// Path of the file that shows which pages were written.
pub const PAGEMAP: &str = "/proc/self/pagemap";

static FILES: Mutex<Vec<(PathBuf, OwnedFd)>> = Mutex::new(Vec::new());

fn files() -> MutexGuard<'static, Vec<(PathBuf, OwnedFd)>> {
    lock(&FILES)
}

/// Registers a descriptor as the file of that name.
pub fn add(name: PathBuf, file: OwnedFd) {
    files().push((name, file));
}

/// Registers a descriptor as the file of that name, in place of an earlier one.
pub fn replace(name: PathBuf, file: OwnedFd) {
    drop(take(&name));
    add(name, file);
}

/// Whether a file of that name was inherited and not taken.
pub fn has(name: &Path) -> bool {
    files().iter().any(|(known, _)| known == name)
}

/// Whether this process was handed its files: then it opens and connects to nothing by name.
pub fn is_used() -> bool {
    [PROC, PAGEMAP].map(Path::new).into_iter().any(has)
}

/// Registers an inherited descriptor as the file of that name. Call it once per number.
///
/// # Errors
///
/// `InvalidInput` for standard streams and numbers that are not open.
#[allow(unsafe_code)] // A number becomes a descriptor.
pub fn add_inherited(name: PathBuf, number: RawFd) -> io::Result<()> {
    let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
    // SAFETY: fcntl takes numbers; no memory is touched.
    if number < 3 || unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        return Err(invalid());
    }
    // SAFETY: the number is open, was passed to this process, and has no other owner here.
    add(name, unsafe { OwnedFd::from_raw_fd(number) });
    Ok(())
}

/// Takes the file of that name, if it was inherited. It can be taken once.
pub fn take(name: &Path) -> Option<OwnedFd> {
    let mut files = files();
    let at = files.iter().position(|(known, _)| known == name)?;
    Some(files.swap_remove(at).1)
}

/// Writes the contents of the file of that name, which was inherited empty, or creates it; afterwards
/// they are on disk.
///
/// # Errors
///
/// If the inherited file can't be written or synced, or as of [`replace`](crate::durable::replace).
pub fn write(name: &Path, contents: &[u8]) -> io::Result<()> {
    match take(name) {
        Some(file) => {
            let file = File::from(file);
            file.write_all_at(contents, 0)?;
            file.sync_data()
        }
        None => crate::durable::replace(name, contents),
    }
}

/// Duplicates the descriptor of the file of that name, if it was inherited and not taken. The
/// duplicates share one file offset.
///
/// # Errors
///
/// If no descriptor is free.
pub fn copy(name: &Path) -> Option<io::Result<OwnedFd>> {
    let files = files();
    let (_, file) = files.iter().find(|(known, _)| known == name)?;
    Some(file.try_clone())
}

/// The file of that name, inherited or opened for reading.
///
/// # Errors
///
/// If the file was not inherited and can't be opened.
pub fn open(name: &Path) -> io::Result<File> {
    match take(name) {
        Some(file) => Ok(file.into()),
        None => File::open(name),
    }
}

/// Opens a file of this process in procfs, such as `maps`.
///
/// # Errors
///
/// If procfs has no such file, or it can't be opened.
pub fn open_proc(name: &str) -> io::Result<File> {
    match copy(Path::new(PROC)) {
        Some(folder) => {
            let flags = OFlags::RDONLY | OFlags::CLOEXEC;
            let file = rustix::fs::openat(folder?, name, flags, Mode::empty())?;
            Ok(file.into())
        }
        None => File::open(Path::new(PROC).join(name)),
    }
}

/// Opens the files of procfs that are needed later, then closes procfs. Does nothing unless this
/// process inherited procfs.
///
/// # Errors
///
/// If `pagemap` can't be opened. Procfs stays open then.
pub fn close_proc() -> io::Result<()> {
    if copy(Path::new(PROC)).is_some() {
        let pagemap = open_proc("pagemap")?;
        add(PAGEMAP.into(), pagemap.into());
        drop(take(Path::new(PROC)));
    }
    Ok(())
}

/// Path of the file that this process executes, as in `maps`.
///
/// # Errors
///
/// If the link `exe` in procfs can't be read.
pub fn program() -> io::Result<PathBuf> {
    use std::os::unix::ffi::OsStringExt;
    let link = match copy(Path::new(PROC)) {
        Some(folder) => rustix::fs::readlinkat(folder?.as_fd(), "exe", Vec::new())?,
        None => rustix::fs::readlink("/proc/self/exe", Vec::new())?,
    };
    Ok(std::ffi::OsString::from_vec(link.into_bytes()).into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek, Write};

    #[test]
    fn a_passed_file_is_found_by_name_and_taken_once() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"handed").unwrap();
        file.rewind().unwrap();
        let name = Path::new("/nowhere/handed");
        assert!(take(name).is_none());
        assert!(open(name).is_err());
        add(name.into(), file.into());
        assert!(copy(name).unwrap().is_ok());
        let mut text = String::new();
        open(name).unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "handed");
        assert!(copy(name).is_none() && take(name).is_none());
    }

    #[test]
    fn the_hosts_procfs_is_used_when_none_was_passed() {
        let mut maps = String::new();
        open_proc("maps")
            .unwrap()
            .read_to_string(&mut maps)
            .unwrap();
        let program = program().unwrap();
        assert!(maps.contains(program.to_str().unwrap()));
        close_proc().unwrap();
        assert!(copy(Path::new(PAGEMAP)).is_none());
    }
}
