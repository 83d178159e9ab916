//! HTTP to ports of VMs, by name: a request for a VM that sleeps wakes it, and is held meanwhile.
//!
//! * [`target`]: which VM and port a request is for.
//! * [`serve`]: connections of clients.
//! * `forward`: one request, and what comes of it.
//! * `refusal`: why a request is not forwarded.

mod forward;
mod refusal;
pub mod serve;
pub mod target;
