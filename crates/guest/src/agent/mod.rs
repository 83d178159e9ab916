//! The agent: after the boot, the loop that serves the host and supervises processes.
//!
//! * [`connection`]: one connection of the host, from request to answer.
//! * [`copy_in`], [`copy_out`]: files and trees; each runs in a copy of this
//!   process, so that a slow disk delays nobody else.
//! * [`stat`]: memory and CPU.
//! * [`ending`]: the orderly end.
//! * `quiesce`: freezes programs for a capture and thaws them; `hold`: its state.
//! * [`run`]: the loop itself; `node`: its messages to and from the node.

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
