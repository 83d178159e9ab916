//! The name server of VMs.
//!
//! It listens at the gateway's address. It answers for the names of VMs of the same network; other
//! questions go to the host's resolvers, if the VM's policy lets the name resolve. If a policy
//! allows a name, the name's addresses are opened before the answer is sent.
//!
//! * [`directory`]: the VMs that may query it, and their names.
//! * [`message`]: questions and answers (RFC 1035).
//! * [`cache`]: a cache of answers.
//! * [`opener`]: opens addresses, and remembers which are open.
//! * [`resolvers`]: the host's resolvers.
//! * [`server`]: sockets, and limits.

pub mod cache;
pub mod directory;
pub mod message;
pub mod opener;
pub mod resolvers;
pub mod server;

#[cfg(test)]
mod tests;

pub use directory::{Asker, Directory};
pub use opener::Open;
pub use server::{NameServer, Sockets};
