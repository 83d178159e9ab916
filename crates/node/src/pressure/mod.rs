//! When the host's memory gets short.
//!
//! * [`level`]: what is to be done about it.
//! * [`stalls`]: the kernel's notice that programs wait for memory.

pub mod level;
pub mod stalls;
