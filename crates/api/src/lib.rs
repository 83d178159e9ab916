//! The HTTP API. The use cases are in `jiffy-node` and the crates below it; this crate parses
//! requests and builds responses.
//!
//! * `routes`: the routing table.
//! * `vms`: VMs and operations on them.
//! * `streams`: requests that become streams of frames.
//! * `snapshots`: snapshots, pause, fork, hibernate and wake.
//! * `queue`: the queue for memory and vCPUs.
//! * `images`: images, pulls and pushes.
//! * `store`: kernels and volumes.
//! * `parts`: bodies, queries and upgrades.
//! * [`serve`], `places`: sockets, connections, and their limits.
//! * `auth`: the bearer token.
//! * `begun`: which requests were begun.
//! * `failure`: errors as responses.

mod auth;
mod begun;
mod failure;
mod images;
mod networks;
mod parts;
mod places;
mod queue;
mod routes;
pub mod serve;
mod snapshots;
mod store;
mod streams;
#[cfg(feature = "testing")]
pub mod testing;
mod vms;
