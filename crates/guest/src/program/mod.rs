//! Programs: from a [`jiffy_wire::agent::Command`] to a process with streams.
//!
//! * [`user`]: who it runs as, by the image's own /etc/passwd and /etc/group.
//! * [`prepare`]: arguments, environment, the files to try.
//! * [`process`]: the running program, its streams and its end.

pub mod prepare;
pub mod process;
pub mod user;
