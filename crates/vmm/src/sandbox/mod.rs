//! The sandbox: what each thread may ask of the kernel once the guest runs.
//!
//! * [`policy`]: which system calls each role needs.
//! * [`filter`]: policies as BPF programs, made when this crate is compiled.
//! * [`violation`]: what happens on any other call.
//!
//! Filters are short: every thread that starts pays for its own.
#![allow(unsafe_code)] // prctl, seccomp and a signal handler.

pub mod filter;
pub mod policy;
pub mod violation;

use jiffy_devices::virtio::device::WorkerRole;
use std::io;

/// Whose system calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The main thread: control socket, pause, starting device threads, end.
    Main,
    /// Runs a vCPU and answers its exits.
    Vcpu,
    /// A device's thread.
    Device(WorkerRole),
}

impl Role {
    /// All roles.
    pub fn all() -> impl Iterator<Item = Role> {
        let devices = WorkerRole::ALL.into_iter().map(Role::Device);
        [Role::Main, Role::Vcpu].into_iter().chain(devices)
    }
}

/// Whether threads are confined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sandbox {
    /// As in production.
    On,
    /// For developers with a debugger.
    Off,
}

impl Sandbox {
    /// Prepares the process: no new privileges, and a handler that reports
    /// forbidden calls. Before any [`enter`](Sandbox::enter).
    pub fn prepare(self) -> io::Result<()> {
        if self == Sandbox::Off {
            return Ok(());
        }
        // SAFETY: sets a flag of this process; no memory is passed.
        if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } != 0 {
            return Err(io::Error::last_os_error());
        }
        violation::install()
    }

    /// Confines the calling thread, and the threads it will start, for good.
    pub fn enter(self, role: Role) -> io::Result<()> {
        if self == Sandbox::Off {
            return Ok(());
        }
        let filter = policy::filter(role);
        let program = libc::sock_fprog {
            len: filter.len() as u16,
            filter: filter.as_ptr().cast_mut(),
        };
        // SAFETY: the kernel copies the program; `filter` has `len`
        // instructions and is not written to.
        let result = unsafe {
            libc::syscall(
                libc::SYS_seccomp,
                libc::SECCOMP_SET_MODE_FILTER,
                0,
                &raw const program,
            )
        };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
