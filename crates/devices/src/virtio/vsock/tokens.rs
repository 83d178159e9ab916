//! Tokens of the events that the engine waits for.
//!
//! Connections and doorbells are watched edge-triggered, and their registration never changes: a
//! connection remembers that its socket is readable until a read finds it empty, and a doorbell
//! needs no read. The listener is level-triggered, because it is not always accepted from.

/// Tokens of connections are `host port << 32 | guest port`. No connection has host port
/// `u32::MAX`, to which these tokens and those of [`numbered`] belong.
const RESERVED: u64 = (u32::MAX as u64) << 32;
/// The worker must stop.
pub const STOP: u64 = RESERVED;
/// Host programs wait to be accepted.
pub const LISTENER: u64 = RESERVED | 1;
/// A queue's doorbell.
pub const DOORBELL: u64 = RESERVED | 2;
/// Connections to host programs that were asked for.
pub const DIALER: u64 = RESERVED | 5;
/// First number of sockets without a connection.
const FIRST_NUMBER: u32 = 16;

/// The token of a socket that has no ports (yet, or any more). Numbers repeat after 2³² sockets.
pub fn numbered(counter: &mut u32) -> u64 {
    *counter = counter.wrapping_add(1).max(FIRST_NUMBER);
    RESERVED | u64::from(*counter)
}
