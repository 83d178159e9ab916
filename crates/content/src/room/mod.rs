//! Room that is reserved before it is used.
//!
//! * [`memory`]: memory of VMs that start or run.
//! * [`disk`]: disk room of what is fetched.

pub mod disk;
mod limit;
pub mod memory;

pub use limit::Limit;
