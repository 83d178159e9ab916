//! Room that is reserved before it is used.
//!
//! * [`memory`]: memory and vCPUs of VMs that start or run, and the queue of those that wait.
//! * [`disk`]: disk room of what is fetched.

pub mod disk;
mod limit;
pub mod memory;

pub use limit::Limit;
