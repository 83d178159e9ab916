//! The instruction clock: what a measurement in the machine means.
//!
//! With [`Accelerator::TcgInstructionClock`] the machine's clock counts the
//! instructions executed by its kernel, the VMM and the guest together: one
//! nanosecond each, so 1 "ms" is a million instructions. It does not price
//! world switches, TLB and cache misses. A wait for the host moves it by
//! itself; therefore everything a measurement touches travels in the
//! initramfs and its output is kept until its end.

use crate::lab::LabOptions;
use jiffy_machine::Accelerator;

impl LabOptions {
    /// A machine on the instruction clock: one CPU, no disk.
    pub fn instruction_clock() -> LabOptions {
        LabOptions {
            accelerator: Accelerator::TcgInstructionClock,
            cpus: 1,
            disk_gib: None,
            ..LabOptions::default()
        }
    }
}
