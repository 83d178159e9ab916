//! Programs: turns a [`jiffy_wire::agent::Command`] into a process with streams.
//!
//! * [`user`]: looks its user up in the image's /etc/passwd and /etc/group.
//! * [`prepare`]: arguments, environment, candidate paths.
//! * [`process`]: the running program, its streams and its exit.

pub mod prepare;
pub mod process;
pub mod user;
