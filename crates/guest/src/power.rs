//! Ends the VM.

use crate::agent::shutdown::Reason;
use crate::boot::Teardown;
use crate::files;
use crate::program::process::Program;
use crate::syscalls;
use alloc::string::String;
use jiffy_wire::agent::Command;
use rustix::system::{RebootCommand, reboot};
use rustix::thread::{Timespec, nanosleep};

/// Writes disks back and ends the VM. Returns only if the kernel refuses.
pub fn end(reason: Reason, teardown: Teardown) {
    teardown.run();
    off(reason);
}

/// Time limit for the distribution's init to shut down, nanoseconds. The node waits at least as
/// long before it ends a stopping VM (`WRITE_BACK_TIME`).
const INIT_TIMEOUT_NS: u64 = 90_000_000_000;

/// Asks PID 1, a distribution's init, to shut down with its `poweroff` or `reboot` program. Returns
/// if that failed or took too long.
pub fn shut_down_by_init(reason: Reason) {
    let program = if can_power_off(reason) {
        "poweroff"
    } else {
        "reboot"
    };
    let command = Command {
        argv: [String::from(program)].into(),
        ..Command::default()
    };
    if Program::start(&command).is_err() {
        return;
    }
    let give_up = syscalls::monotonic_ns() + INIT_TIMEOUT_NS;
    while syscalls::monotonic_ns() < give_up {
        let _ = nanosleep(&Timespec {
            tv_sec: 0,
            tv_nsec: 100_000_000,
        });
    }
}

/// Whether the reason is a power-off and the VM has ACPI to do it.
fn can_power_off(reason: Reason) -> bool {
    reason == Reason::PowerOff && files::exists(c"/sys/firmware/acpi")
}

/// Powers off or resets. Without ACPI a PC can't power off; a reset ends the VM as well, because
/// the VMM ends then.
fn off(reason: Reason) {
    if can_power_off(reason) {
        let _ = reboot(RebootCommand::PowerOff);
    }
    let _ = reboot(RebootCommand::Restart);
}

/// After a panic of init: syncs and ends the VM.
pub fn emergency() {
    rustix::fs::sync();
    off(Reason::PowerOff);
}
