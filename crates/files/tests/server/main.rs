//! The server as a process, with well-behaved and hostile guests.

mod client;
mod escapes;
mod hostile;
mod kernel;
mod owners;
mod serving;
mod stream;
