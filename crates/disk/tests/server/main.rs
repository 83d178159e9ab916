//! The server as a process, with well-behaved and hostile monitors.

mod client;
mod hostile;
mod serving;
