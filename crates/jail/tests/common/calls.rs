//! Raw system calls for escape attempts.
#![allow(unsafe_code)]

use libc::{c_int, c_long};
use std::io;

/// The result of a system call.
pub fn got(result: c_long) -> io::Result<c_long> {
    match result {
        0.. => Ok(result),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The result of a system call that returns no value.
pub fn reply(result: c_int) -> io::Result<()> {
    got(result.into()).map(drop)
}

/// Any system call.
pub fn call(number: c_long, a: [c_long; 6]) -> io::Result<()> {
    // SAFETY: the call affects this process only.
    got(unsafe { libc::syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]) }).map(drop)
}
