//! The trace port: a byte written by guest code marks an event.

#[cfg(test)]
mod tests;

use crate::bus::BusDevice;
use serde::{Deserialize, Serialize};

/// Receives marks. It is called on the vCPU's thread at the moment of the write, so it must take
/// the time first and be fast.
pub type MarkSink = Box<dyn FnMut(u8) + Send>;

/// The port. It passes on a fixed number of marks after boot or restore and only counts the rest,
/// so that a guest that writes without end does not fill the host's memory.
pub struct TracePort {
    sink: MarkSink,
    limit: u64,
    written: u64,
}

/// A saved trace port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceState {
    /// Most marks that are passed on.
    pub limit: u64,
    /// Marks written since boot or restore, passed on or not.
    pub written: u64,
}

impl TracePort {
    /// A port that passes on the first `limit` marks.
    pub fn new(limit: u64, sink: MarkSink) -> TracePort {
        TracePort::restore(limit, sink, &TraceState { limit, written: 0 })
    }

    /// Restores a saved port; its limit is at most `limit`. Marks are counted from zero again: the
    /// timeline begins anew, and marks at the clone gate must be passed on even if the guest had
    /// used up its limit before it was saved.
    pub fn restore(limit: u64, sink: MarkSink, state: &TraceState) -> TracePort {
        TracePort {
            sink,
            limit: state.limit.min(limit),
            written: 0,
        }
    }

    /// The port's state.
    pub fn save(&self) -> TraceState {
        TraceState {
            limit: self.limit,
            written: self.written,
        }
    }

    /// How many marks were not passed on.
    pub fn dropped(&self) -> u64 {
        self.written.saturating_sub(self.limit)
    }
}

impl BusDevice for TracePort {
    /// Reads return ones, as from an absent port.
    fn read(&mut self, _offset: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    /// Each byte is a mark.
    fn write(&mut self, _offset: u64, data: &[u8]) {
        for mark in data {
            if self.written < self.limit {
                (self.sink)(*mark);
            }
            self.written = self.written.saturating_add(1);
        }
    }
}
