//! The name server of VMs.
//!
//! It is asked at the gateway's address. VMs of one network have their names there; what else
//! is asked goes to the host's resolvers, if the policy of who asks lets the name resolve. The
//! addresses of a name that a policy allows are opened before the answer is given.
//!
//! * [`directory`]: who asks, and who has which name.
//! * [`message`]: questions and answers (RFC 1035).
//! * [`cache`]: answers that are kept for a while.
//! * [`resolvers`]: the host's resolvers.
//! * [`server`]: sockets, and how much is done at a time.

pub mod cache;
pub mod directory;
pub mod message;
pub mod resolvers;
pub mod server;

#[cfg(test)]
mod tests;

pub use directory::{Asker, Directory};
pub use server::{NameServer, Open, Sockets};
