//! Reservations of memory, vCPUs and disk room.
//!
//! * [`memory`]: memory and vCPUs of VMs, and the queue of starts that wait for them.
//! * [`disk`]: disk room of what is about to be written.

pub mod disk;
mod limit;
pub mod memory;

pub use limit::{Limit, MemoryLimit, parse_bytes};
