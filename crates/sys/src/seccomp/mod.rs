//! System call filters (seccomp(2)).
//!
//! * [`filter`]: lists of system calls as BPF programs, generated when a crate is compiled.
//! * [`lists`]: calls that all confined programs need.
#![allow(unsafe_code)] // seccomp has no safe wrapper.

pub mod filter;
pub mod lists;

use filter::Filter;
use std::io;

/// Filters the system calls of the calling thread and of threads that it will start, irrevocably.
/// The thread must have given up new privileges (`PR_SET_NO_NEW_PRIVS`).
///
/// # Errors
///
/// If seccomp(2) fails: `EACCES` if the thread has not given up new privileges.
pub fn install(filter: &Filter) -> io::Result<()> {
    let filter = filter.as_slice();
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_ptr().cast_mut(),
    };
    // SAFETY: the kernel copies the program; `filter` has `len` instructions and is not written to.
    let result = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            0,
            &raw const program,
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
