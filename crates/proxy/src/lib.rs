//! HTTP to ports of VMs, by name: a request for a VM that sleeps wakes it, and is held meanwhile.
//!
//! * [`target`]: which VM and port a request is for.
//! * [`serve`]: connections of clients.
//! * `socket`: a client's socket, and whether it is broken.
//! * [`tls`]: the certificate and its key, and handshakes.
//! * `access`: who may send requests.
//! * `forward`: one request, and what comes of it.
//! * `shares`: how many requests and connections each VM may have.
//! * `upgrade`: connections that switch protocols.
//! * `refusal`: why a request is not forwarded.

mod access;
mod forward;
mod refusal;
pub mod serve;
mod shares;
mod socket;
pub mod target;
pub mod tls;
mod upgrade;
