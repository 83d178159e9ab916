//! Writes marks to the trace port.

use crate::syscalls::ports::Ports;
use jiffy_wire::trace::TRACE_PORT;

/// The trace port, if it is available.
#[derive(Debug, Clone, Copy, Default)]
pub struct Trace(Option<Ports>);

impl Trace {
    /// Requests the port from the kernel. On a host without a trace port writes have no effect.
    pub fn open() -> Trace {
        Trace(Ports::open(TRACE_PORT, 1))
    }

    /// Marks an event now.
    pub fn mark(&self, mark: u8) {
        if let Some(port) = &self.0 {
            port.write_byte(0, mark);
        }
    }
}
