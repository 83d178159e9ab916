//! Decides when a VM is idle.
//!
//! * [`sample`]: reads how much of the host a VM has used until now.
//! * [`watch`]: compares samples, counts uses, and records since when a VM is idle.

pub mod sample;
pub mod watch;
