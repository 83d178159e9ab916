//! The sandbox: the system calls that each thread may make once the guest runs.
//!
//! * [`policy`]: which system calls each role needs.
//! * [`violation`]: handles any other call.
//!
//! Filters are short, because every thread that starts has to install its own.

pub mod policy;
pub mod violation;

use jiffy_devices::virtio::device::WorkerRole;
use jiffy_sys::{handed, seccomp};
use rustix::process::DumpableBehavior;
use std::io;

/// The role of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The main thread: control socket, pause, starting device threads, end.
    Main,
    /// The main thread of a VMM that was not handed its files: it opens and removes files and
    /// connects to sockets by name.
    MainByName,
    /// Runs a vCPU and answers its exits.
    Vcpu,
    /// A device's thread.
    Device(WorkerRole),
}

impl Role {
    /// All roles.
    pub fn all() -> impl Iterator<Item = Role> {
        let devices = WorkerRole::ALL.into_iter().map(Role::Device);
        let others = [Role::Main, Role::MainByName, Role::Vcpu];
        others.into_iter().chain(devices)
    }

    /// The role of this process's main thread.
    pub fn of_main() -> Role {
        match handed::is_used() {
            true => Role::Main,
            false => Role::MainByName,
        }
    }
}

/// For a VMM that was handed its files, before its guest runs: opens what it needs of procfs later,
/// closes procfs, and makes the process not dumpable, so that only root can inspect its memory.
///
/// # Errors
///
/// If `pagemap` can't be opened, or prctl(2) fails.
pub fn close_proc() -> io::Result<()> {
    if !handed::is_used() {
        return Ok(());
    }
    handed::close_proc()?;
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    // The process was executed by a descriptor, which the kernel would use as its name.
    Ok(rustix::thread::set_name(c"jiffy-vmm")?)
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
    /// Prepares the process: sets no-new-privileges, and installs a handler that reports forbidden
    /// calls. Must be called before any [`enter`](Sandbox::enter).
    ///
    /// # Errors
    ///
    /// If prctl(2) or sigaction(2) fails, or the event descriptor can't be created.
    pub fn prepare(self) -> io::Result<()> {
        if self == Sandbox::Off {
            return Ok(());
        }
        rustix::thread::set_no_new_privs(true)?;
        violation::install()
    }

    /// Confines the calling thread, and the threads that it will start, irrevocably.
    ///
    /// # Errors
    ///
    /// If seccomp(2) fails.
    pub fn enter(self, role: Role) -> io::Result<()> {
        if self == Sandbox::Off {
            return Ok(());
        }
        seccomp::install(policy::filter(role))
    }
}

#[cfg(test)]
mod tests;
