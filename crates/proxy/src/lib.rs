//! HTTP to ports of VMs, by name. A request for a hibernated VM wakes it, and waits meanwhile.
//!
//! * [`target`]: finds the VM and port of a request.
//! * [`serve`]: connections of clients.
//! * `socket`: a client's socket; detects that it is broken.
//! * [`tls`]: certificate, key, and handshakes.
//! * `access`: authenticates requests by a token.
//! * `forward`: forwards one request to its VM.
//! * `servers`: sends it over a connection to the VM; `pool`: idle connections.
//! * `outgoing`, `answer`: the bodies of a request and of its answer.
//! * `shares`: limits requests and connections of each VM.
//! * `upgrade`: connections that switch protocols.
//! * `refusal`: error responses of the proxy.

mod access;
mod answer;
mod forward;
mod outgoing;
mod pool;
mod refusal;
pub mod serve;
mod servers;
mod shares;
mod socket;
pub mod target;
#[cfg(feature = "testing")]
pub mod testing;
pub mod tls;
mod upgrade;

use hyper::header::{CONNECTION, HeaderMap};

/// Most bytes of a request's header, and of buffered data in each direction.
const BUFFER: usize = 64 << 10;

/// The options of the header `Connection` (RFC 9110 §7.6.1).
fn connection_options(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let values = headers.get_all(CONNECTION).iter();
    let values = values.filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(str::trim)
}
