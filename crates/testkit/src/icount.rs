//! The instruction clock, and what measurements with it mean.
//!
//! With [`Accelerator::TcgInstructionClock`] the machine's clock counts the instructions of its
//! kernel, the VMM and the guest: one nanosecond each, so 1 "ms" is a million instructions. World
//! switches, TLB misses and cache misses cost nothing. Waits for the host advance the clock as
//! well, so all files of a measurement are in the initramfs, and its output is kept until its end.

use crate::lab::LabOptions;
use jiffy_machine::Accelerator;

impl LabOptions {
    /// Options of a machine on the instruction clock: one CPU, no disk.
    pub fn instruction_clock() -> LabOptions {
        LabOptions {
            accelerator: Accelerator::TcgInstructionClock,
            cpus: 1,
            disk_gib: None,
            ..LabOptions::default()
        }
    }
}
