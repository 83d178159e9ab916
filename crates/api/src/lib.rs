//! The HTTP API. The use cases are in `jiffy-node` and the crates below it; this crate parses
//! requests and builds responses.
//!
//! * `routes`: the routing table.
//! * `vms`: VMs and operations on them.
//! * `streams`: requests that become streams of frames.
//! * `snapshots`: snapshots, pause, fork, hibernate and wake.
//! * `events`: the stream of events.
//! * `queue`: the queue for memory and vCPUs.
//! * `images`: images, pulls and pushes.
//! * `store`: kernels and volumes.
//! * `http`: bodies, queries and upgrades.
//! * [`serve`], `client_slots`: sockets, connections, and their limits.
//! * `auth`: the bearer token.
//! * `request_ids`: which requests were begun.
//! * `failure`: errors as responses.

mod auth;
mod client_slots;
mod events;
mod failure;
mod http;
mod images;
mod networks;
mod queue;
mod request_ids;
mod routes;
pub mod serve;
mod snapshots;
mod store;
mod streams;
#[cfg(feature = "testing")]
pub mod testing;
mod vms;
