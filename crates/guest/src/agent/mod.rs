//! The agent: the event loop after the boot, which serves the host and supervises processes.
//!
//! * [`connection`]: a connection of the host, from request to answer.
//! * [`copy_in`], [`copy_out`]: copies files and trees, each in a forked process, so that a slow
//!   disk delays nothing else.
//! * [`stat`]: memory and CPU; `cpus`: brings vCPUs on and off line.
//! * [`shutdown`]: signals, grace period and last messages before the power goes off.
//! * `quiesce`: freezes programs for a capture and thaws them; `hold`: its state.
//! * [`run`]: the event loop; `requests`: what connections ask of it; `node`: its messages to and
//!   from the node.

mod changes;
pub mod connection;
mod copy_in;
pub mod copy_out;
mod cpus;
mod hold;
mod node;
mod quiesce;
mod requests;
pub mod run;
pub mod shutdown;
pub mod stat;

pub use run::{Agent, End, Options};
