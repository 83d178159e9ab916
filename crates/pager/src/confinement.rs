//! Confines the pager before it serves anyone: it parses input of VMMs and origins, and holds the
//! memory of all VMs.

use jiffy_jail::confine::{self, ConfineError, Folders};
use jiffy_sys::seccomp::filter::{Filter, Refusal, Rule, call, call_with};
use jiffy_sys::seccomp::lists::{CONNECTIONS, FIONBIO, OPEN_FILES, PROCESS, THREADS};
use jiffy_sys::{seccomp, userfaultfd};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Folders with information about processes, the host and its processors.
const FACTS: [&str; 2] = ["/proc", "/sys/devices/system/cpu"];

/// Why the pager, or a process of `jiffy-origins`, can't be confined.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConfinementError {
    /// A folder can't be listed.
    #[error("the folder {0:?} can't be read")]
    Folder(PathBuf, #[source] io::Error),
    /// The kernel refuses.
    #[error(transparent)]
    Own(#[from] ConfineError),
    /// The kernel refuses the seccomp filter.
    #[error("system calls can't be filtered")]
    Filter(#[source] io::Error),
}

/// Confines this process, which must have one thread, to these folders and to the system calls of a
/// pager, permanently. Returns false if the kernel has no Landlock, which restricts the folders.
///
/// # Errors
///
/// If a folder can't be listed, or the kernel refuses the restrictions or the seccomp filter.
pub fn enter(folders: &[PathBuf]) -> Result<bool, ConfinementError> {
    let mut writable = folders.to_vec();
    for folder in folders {
        // A folder in it may be a link to another disk.
        let linked = linked_folders(folder)
            .map_err(|error| ConfinementError::Folder(folder.clone(), error))?;
        writable.extend(linked);
    }
    let writable: Vec<&Path> = writable.iter().map(PathBuf::as_path).collect();
    let readable = FACTS.map(Path::new);
    let bounded = confine::confine(&Folders {
        readable: &readable,
        writable: &writable,
        ..Folders::default()
    })?;
    seccomp::install(&FILTER).map_err(ConfinementError::Filter)?;
    Ok(bounded)
}

/// Links to folders in this folder.
fn linked_folders(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let path = entry.path();
        if entry.file_type()?.is_symlink() && path.is_dir() {
            found.push(path);
        }
    }
    Ok(found)
}

const UNIX: u32 = libc::AF_UNIX as u32;
const IOCTLS: &[u32] = {
    let [copy, zero, wake] = userfaultfd::FILLING;
    &[FIONBIO, copy, zero, wake]
};

/// Images, caches, recordings, and the sockets' files, by name; and memory that is shared with VMMs.
const FILES: &[Rule] = &[
    call(libc::SYS_open),
    call(libc::SYS_openat),
    call(libc::SYS_stat),
    call(libc::SYS_lstat),
    call(libc::SYS_statfs),
    call(libc::SYS_fstatfs),
    call(libc::SYS_ftruncate),
    call(libc::SYS_sync_file_range),
    call(libc::SYS_fadvise64),
    call(libc::SYS_flock),
    call(libc::SYS_getdents64),
    call(libc::SYS_readlink),
    call(libc::SYS_readlinkat),
    call(libc::SYS_access),
    call(libc::SYS_faccessat),
    call(libc::SYS_copy_file_range),
    call(libc::SYS_mkdir),
    call(libc::SYS_mkdirat),
    call(libc::SYS_rename),
    call(libc::SYS_renameat),
    call(libc::SYS_renameat2),
    call(libc::SYS_link),
    call(libc::SYS_linkat),
    call(libc::SYS_unlink),
    call(libc::SYS_unlinkat),
    call(libc::SYS_rmdir),
    call(libc::SYS_fchmod),
    call(libc::SYS_utimensat),
    call(libc::SYS_memfd_create),
    // Comparing its user with that of a connection.
    call(libc::SYS_geteuid),
    call_with(libc::SYS_ioctl, 1, IOCTLS),
];

/// Unix sockets that others connect to; the pager itself never connects.
const SOCKETS: &[Rule] = &[
    call_with(libc::SYS_socket, 0, &[UNIX]),
    call_with(libc::SYS_socketpair, 0, &[UNIX]),
    call(libc::SYS_bind),
    call(libc::SYS_listen),
    // A thread lowers its own priority for a while.
    call_with(libc::SYS_setpriority, 1, &[0]),
];

static FILTER: Filter = Filter::build(
    &[PROCESS, THREADS, OPEN_FILES, CONNECTIONS, FILES, SOCKETS],
    Refusal::Error,
);
