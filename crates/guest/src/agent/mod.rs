//! The agent: the loop that serves the host and looks after every process,
//! once the guest is booted.
//!
//! * [`connection`]: one connection of the host, from request to answer.
//! * [`copy_in`], [`copy_out`]: files and trees; each runs in a copy of this
//!   process, so that a slow disk delays nobody else.
//! * [`stat`]: memory and CPU.
//! * [`ending`]: the orderly end.
//! * `quiesce`: programs held still for a capture, and the way on from there;
//!   `hold`: what is kept meanwhile.
//! * [`run`]: the loop itself; `node`: its talk with the node.

mod changes;
pub mod connection;
mod copy_in;
pub mod copy_out;
pub mod ending;
mod hold;
mod node;
mod quiesce;
pub mod run;
pub mod stat;

pub use run::{Agent, End, Options};
