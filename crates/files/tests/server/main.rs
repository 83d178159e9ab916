//! The server as a process, with well-behaved and hostile guests.

mod captures;
mod client;
mod escapes;
mod hostile;
mod kernel;
mod owners;
mod serving;
mod stream;
