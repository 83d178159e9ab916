//! Confines the server before it reads the first request.

use jiffy_jail::confine::ConfineError;
use jiffy_jail::rooted::{self, Rooted};
use jiffy_sys::seccomp;
use jiffy_sys::seccomp::filter::{Filter, Refusal, Rule, call, call_without};
use jiffy_sys::seccomp::lists::{OPEN_FILES, PROCESS, THREADS};
use std::io;
use std::os::fd::BorrowedFd;
use thiserror::Error;

/// Why the server can't confine itself.
#[derive(Debug, Error)]
pub enum ConfinementError {
    /// It can't restrict its access to files.
    #[error("the server can't confine itself to the folder")]
    Files(#[from] ConfineError),
    /// It can't restrict its system calls.
    #[error("the server can't filter its system calls")]
    Calls(#[source] io::Error),
}

/// Confines this process, which must have one thread, permanently to a folder. With `users` it is
/// root and can act as other users.
///
/// # Errors
///
/// If the kernel refuses the restrictions of files, or the seccomp filter.
pub fn enter(
    folder: BorrowedFd<'_>,
    read_only: bool,
    users: bool,
) -> Result<Rooted, ConfinementError> {
    let rooted = rooted::confine(folder, read_only, users)?;
    seccomp::install(&FILTER).map_err(ConfinementError::Calls)?;
    Ok(rooted)
}

/// The bit of a mode that only devices have: `S_IFCHR` has it, `S_IFBLK` too, no other kind.
const DEVICE: u32 = libc::S_IFCHR;

/// Everything that a request can do to a file.
const FILES: &[Rule] = &[
    call(libc::SYS_openat),
    call(libc::SYS_openat2),
    call(libc::SYS_getdents64),
    call(libc::SYS_readlinkat),
    call(libc::SYS_mkdirat),
    call_without(libc::SYS_mknodat, 2, DEVICE),
    call(libc::SYS_symlinkat),
    call(libc::SYS_linkat),
    call(libc::SYS_unlinkat),
    call(libc::SYS_renameat2),
    call(libc::SYS_fchmodat),
    call(libc::SYS_fchownat),
    call(libc::SYS_utimensat),
    call(libc::SYS_ftruncate),
    call(libc::SYS_fstatfs),
    call(libc::SYS_faccessat),
    call(libc::SYS_faccessat2),
    call(libc::SYS_fgetxattr),
    call(libc::SYS_fsetxattr),
    call(libc::SYS_flistxattr),
    call(libc::SYS_fremovexattr),
    call(libc::SYS_setresuid),
    call(libc::SYS_setresgid),
];

/// The socket on which requests come.
const SOCKET: &[Rule] = &[
    call(libc::SYS_recvfrom),
    call(libc::SYS_sendto),
    call(libc::SYS_poll),
    call(libc::SYS_ppoll),
];

static FILTER: Filter = Filter::build(
    &[PROCESS, THREADS, OPEN_FILES, FILES, SOCKET],
    Refusal::Error,
);
