//! The channel to the node: readiness, init's spans and warnings, services' lines and the first
//! command's streams.
//!
//! * [`link`]: the connection: connect, hello, reconnect.
//! * [`window`]: output that is kept until the host confirms it.
//! * [`first_command`]: the first command.

pub mod first_command;
pub mod link;
pub mod window;
