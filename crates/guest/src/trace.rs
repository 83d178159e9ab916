//! Marks on the trace port, where the host has one.

use crate::syscalls::ports::Ports;
use jiffy_wire::trace::TRACE_PORT;

/// The trace port, or nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Trace(Option<Ports>);

impl Trace {
    /// Asks the kernel for the port. On a host without a trace port the
    /// writes go nowhere.
    pub fn open() -> Trace {
        Trace(Ports::open(TRACE_PORT, 1))
    }

    /// Marks that something happened now.
    pub fn mark(&self, mark: u8) {
        if let Some(port) = &self.0 {
            port.write_byte(0, mark);
        }
    }
}
