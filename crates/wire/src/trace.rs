//! Marks: single bytes that guest code writes to the trace port.
//!
//! The VMM stamps each with the host's monotonic clock. This relates the guest's clock to the
//! host's.

use alloc::{format, string::String};

/// The trace port's number. Writing one byte marks an event.
pub const TRACE_PORT: u16 = 0x0a4a;

/// The kernel's first instructions (only kernels made to measure them write it).
pub const MARK_KERNEL_ENTRY: u8 = 0x01;
/// The first instructions of PID 1.
pub const MARK_PID1: u8 = 0x10;
/// The agent accepts requests.
pub const MARK_AGENT_READY: u8 = 0x11;
/// The first command was started.
pub const MARK_COMMAND_STARTED: u8 = 0x12;
/// The first command ended.
pub const MARK_COMMAND_DONE: u8 = 0x13;
/// A restored guest has taken on its new generation, and its workload runs.
pub const MARK_GATE_PASSED: u8 = 0x14;
/// A restored guest could not take on its new generation; the VMM ends the VM.
pub const MARK_GATE_FAILED: u8 = 0x15;
/// First instructions of a guest that has noticed that it was restored.
pub const MARK_GATE_ENTERED: u8 = 0x16;
/// First of the values for users' own code (up to 0xff).
pub const MARK_USER_FIRST: u8 = 0x80;

/// The name of a mark on the timeline.
pub fn mark_name(mark: u8) -> String {
    match mark {
        MARK_KERNEL_ENTRY => "kernel entry".into(),
        MARK_PID1 => "PID 1".into(),
        MARK_AGENT_READY => "agent ready".into(),
        MARK_COMMAND_STARTED => "command started".into(),
        MARK_COMMAND_DONE => "command done".into(),
        MARK_GATE_ENTERED => "gate entered".into(),
        MARK_GATE_PASSED => "gate acknowledged".into(),
        MARK_GATE_FAILED => "gate failed".into(),
        other => format!("mark {other:#04x}"),
    }
}
