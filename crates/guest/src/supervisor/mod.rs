//! The channel to the node: readiness, what init measured, services' lines and
//! the first command's streams.
//!
//! * [`link`]: the connection itself: dial, hello, dial again.
//! * [`window`]: output kept until the host confirms it.
//! * [`first`]: the first command.

pub mod first;
pub mod link;
pub mod window;
