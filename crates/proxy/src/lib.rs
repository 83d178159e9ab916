//! HTTP to ports of VMs, by name. A request for a hibernated VM wakes it, and waits meanwhile.
//!
//! * [`target`]: finds the VM and port of a request.
//! * [`serve`]: connections of clients.
//! * `socket`: a client's socket; detects that it is broken.
//! * [`tls`]: certificate, key, and handshakes.
//! * `access`: authenticates requests by a token.
//! * `forward`: forwards one request to its VM.
//! * `shares`: limits requests and connections of each VM.
//! * `upgrade`: connections that switch protocols.
//! * `refusal`: error responses of the proxy.

mod access;
mod forward;
mod refusal;
pub mod serve;
mod shares;
mod socket;
pub mod target;
#[cfg(feature = "testing")]
pub mod testing;
pub mod tls;
mod upgrade;
