//! The server as a process, and monitors that play by the rules, or don't.

mod client;
mod hostile;
mod serving;
