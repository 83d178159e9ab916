//! Confines the process before it reads anything.

use jiffy_jail::confine::{self, ConfineError};
use jiffy_rootfs::Limits;
use jiffy_sys::seccomp;
use jiffy_sys::seccomp::filter::{Filter, Refusal, Rule, call, call_with};
use jiffy_sys::seccomp::lists::{PROCESS, THREADS};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, Signal, set_parent_process_death_signal, setrlimit};
use std::io;
use thiserror::Error;

/// Address space, bytes: an image of the most entries and names needs 1.2 GB, and the decoders of
/// layers a few windows of 128 MiB.
const MEMORY: u64 = 4 << 30;
/// Processor time, seconds: unpacking the most bytes at 10 MB/s.
const TIME: u64 = 4 * 3600;

/// Why the process can't confine itself.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConfinementError {
    /// No new privileges, capabilities, or Landlock.
    #[error("the import process can't be confined")]
    Rights(#[from] ConfineError),
    /// A limit can't be set.
    #[error("the import process can't be limited")]
    Limit(#[source] Errno),
    /// The filter can't be installed.
    #[error("the system calls of the import process can't be filtered")]
    Filter(#[source] io::Error),
}

/// Confines this process, which must have one thread, permanently: no capability, file, folder,
/// network or new descriptor, and limits. It is killed when the thread of the daemon that started it
/// ends. Where the kernel has no Landlock, [`filter`] alone keeps files out of reach.
///
/// # Errors
///
/// If capabilities can't be dropped, Landlock refuses the rules, or `setrlimit` or `prctl` fails.
pub fn enter() -> Result<(), ConfinementError> {
    confine::seal()?;
    let files = Limits::default();
    let largest = files.unpacked_bytes.max(files.image_bytes);
    for (resource, most) in [
        (Resource::As, MEMORY),
        (Resource::Cpu, TIME),
        (Resource::Fsize, largest),
        (Resource::Memlock, 0),
        (Resource::Msgqueue, 0),
    ] {
        limit(resource, most)?;
    }
    // Changes of capabilities clear it.
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(ConfinementError::Limit)
}

/// Filters the system calls of this process: only reading and writing of open files, memory and
/// threads are left.
///
/// # Errors
///
/// If `setrlimit` fails, or the filter can't be installed.
pub fn filter() -> Result<(), ConfinementError> {
    // No further descriptor; open ones stay.
    limit(Resource::Nofile, 0)?;
    seccomp::install(&FILTER).map_err(ConfinementError::Filter)
}

fn limit(resource: Resource, most: u64) -> Result<(), ConfinementError> {
    let bound = |limit: Option<u64>| Some(limit.map_or(most, |limit| limit.min(most)));
    let maximum = bound(rustix::process::getrlimit(resource).maximum);
    let limit = Rlimit {
        current: maximum,
        maximum,
    };
    setrlimit(resource, limit).map_err(ConfinementError::Limit)
}

/// Sharing the blocks of a parent image: both files are open.
const FICLONE: u32 = libc::FICLONE as u32;
/// Flags of a descriptor. Without `F_SETOWN` and `F_SETSIG`, which send signals.
const FLAGS: &[u32] = &[
    libc::F_GETFD as u32,
    libc::F_SETFD as u32,
    libc::F_GETFL as u32,
];

/// Calls on descriptors; none takes a path.
const FILES: &[Rule] = &[
    call(libc::SYS_close),
    call_with(libc::SYS_fcntl, 1, FLAGS),
    call(libc::SYS_fstat),
    call(libc::SYS_lseek),
    call(libc::SYS_read),
    call(libc::SYS_write),
    call(libc::SYS_readv),
    call(libc::SYS_writev),
    call(libc::SYS_pread64),
    call(libc::SYS_pwrite64),
    call(libc::SYS_ftruncate),
    call_with(libc::SYS_ioctl, 1, &[FICLONE]),
];

static FILTER: Filter = Filter::build(&[PROCESS, THREADS, FILES], Refusal::Error);
