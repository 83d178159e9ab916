//! Detects that the host's memory gets short.
//!
//! * [`level`]: decides what to do about it.
//! * [`stalls`]: the kernel's notification that programs wait for memory (PSI).

pub mod level;
pub mod stalls;
