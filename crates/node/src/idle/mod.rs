//! When a VM is idle.
//!
//! * [`sample`]: what a VM has used of the host until now.
//! * [`watch`]: judges samples and uses, and remembers since when a VM is idle.

pub mod sample;
pub mod watch;
