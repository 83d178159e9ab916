//! The last step: the end of the VM.

use crate::agent::ending::Reason;
use crate::boot::Teardown;
use crate::files;
use rustix::system::{RebootCommand, reboot};

/// Writes disks back and ends the VM. Returns only if the kernel refuses.
pub fn end(reason: Reason, teardown: Teardown) {
    teardown.run();
    off(reason);
}

/// Without ACPI nothing switches a PC off; a reset ends the VM just as well,
/// because the VMM ends with it.
fn off(reason: Reason) {
    let can_power_off = files::exists(c"/sys/firmware/acpi");
    if reason == Reason::PowerOff && can_power_off {
        let _ = reboot(RebootCommand::PowerOff);
    }
    let _ = reboot(RebootCommand::Restart);
}

/// After a mistake of init itself: save what can be saved, and end.
pub fn emergency() {
    rustix::fs::sync();
    off(Reason::PowerOff);
}
