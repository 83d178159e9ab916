//! The HTTP API. What each route does is in `jiffy-node` and below; here
//! requests are taken apart and answers put together.
//!
//! * `routes`: which request goes where.
//! * `vms`: VMs and what can be done to them.
//! * `streams`: requests that become streams of frames.
//! * `snapshots`: snapshots, and VMs that pause, fork, hibernate and wake.
//! * `images`: images, pulls and pushes.
//! * `store`: kernels and volumes.
//! * `parts`: bodies, queries and upgrades.
//! * [`serve`], `places`: sockets and their connections, and how many there may be.
//! * [`auth`]: the token.
//! * `failure`: errors as answers.

pub mod auth;
mod failure;
mod images;
mod networks;
mod parts;
mod places;
mod routes;
pub mod serve;
mod snapshots;
mod store;
mod streams;
#[cfg(feature = "testing")]
pub mod testing;
mod vms;

pub use routes::router;
