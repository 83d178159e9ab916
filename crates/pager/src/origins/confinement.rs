//! Confines the process that reads from registries and peers: it parses what they send, and has
//! their credentials.

use crate::confinement::ConfinementError;
use jiffy_jail::confine::{self, Folders, Tcp};
use jiffy_sys::seccomp;
use jiffy_sys::seccomp::filter::{Filter, Refusal, Rule, call, call_with, call_without};
use jiffy_sys::seccomp::lists::{CONNECTIONS, FIONBIO, OPEN_FILES, PROCESS, THREADS};
use std::path::Path;

/// Confines this process, which must have one thread, permanently: it can read all files of its
/// user, because credentials, authorities and peers' folders can be anywhere, but change none and
/// execute none; it can connect to networks, but not to Unix sockets. Returns false if the kernel
/// has no Landlock, which refuses the same of files once more, and other processes' abstract sockets.
///
/// # Errors
///
/// If the kernel refuses the restrictions or the seccomp filter.
pub fn enter() -> Result<bool, ConfinementError> {
    let bounded = confine::confine(&Folders {
        readable: &[Path::new("/")],
        tcp: Tcp::Connect,
        ..Folders::default()
    })?;
    seccomp::install(&FILTER).map_err(ConfinementError::Filter)?;
    Ok(bounded)
}

/// Number of bytes that can be read: the C library's resolver asks for it.
const FIONREAD: u32 = 0x541b;

/// Flags of open(2) with which a file can be changed.
const WRITING: u32 = (libc::O_WRONLY | libc::O_RDWR | libc::O_CREAT | libc::O_TRUNC) as u32;

/// Credentials, authorities, and images of peers, by name, for reading.
const FILES: &[Rule] = &[
    call_without(libc::SYS_open, 1, WRITING),
    call_without(libc::SYS_openat, 2, WRITING),
    call(libc::SYS_stat),
    call(libc::SYS_lstat),
    call(libc::SYS_access),
    call(libc::SYS_faccessat),
    call(libc::SYS_readlink),
    call(libc::SYS_readlinkat),
    call(libc::SYS_getdents64),
    call(libc::SYS_getcwd),
    call(libc::SYS_fadvise64),
    call_with(libc::SYS_ioctl, 1, &[FIONBIO, FIONREAD]),
    // The memory for the pager.
    call(libc::SYS_memfd_create),
    call(libc::SYS_ftruncate),
];

const NETWORKS: &[u32] = &[
    libc::AF_INET as u32,
    libc::AF_INET6 as u32,
    // The resolver asks which addresses this host has.
    libc::AF_NETLINK as u32,
];
const UNIX: u32 = libc::AF_UNIX as u32;

/// Connections to registries, and names of hosts.
const NETWORK: &[Rule] = &[
    call_with(libc::SYS_socket, 0, NETWORKS),
    call_with(libc::SYS_socketpair, 0, &[UNIX]),
    call(libc::SYS_connect),
    call(libc::SYS_bind),
    call(libc::SYS_getsockname),
    call(libc::SYS_getpeername),
    call(libc::SYS_setsockopt),
    call(libc::SYS_sendmmsg),
    call(libc::SYS_uname),
];

static FILTER: Filter = Filter::build(
    &[PROCESS, THREADS, OPEN_FILES, CONNECTIONS, FILES, NETWORK],
    Refusal::Error,
);
