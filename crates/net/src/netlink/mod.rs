//! Requests to the kernel in batches, each one datagram.
//!
//! * [`batch`]: messages and their attributes, written one after the other.
//! * [`channel`]: a socket, and what the kernel answers.

pub mod batch;
pub mod channel;

#[cfg(test)]
mod tests;

pub use batch::{Attributes, Batch};
pub use channel::{Channel, Refusal};

/// Bytes of a message's header (netlink(7), `struct nlmsghdr`).
const HEADER: usize = 16;
/// Bytes of an attribute's header (`struct nlattr`).
const ATTRIBUTE_HEADER: usize = 4;
/// Of an attribute's type, the bits that are no flags.
const TYPE_MASK: u16 = 0x3fff;
const NESTED: u16 = 0x8000;

/// `NLM_F_*` flags of a request.
pub mod flags {
    /// Something is asked of the kernel.
    pub const REQUEST: u16 = 1;
    /// The kernel is to say when it is done.
    pub const ACK: u16 = 4;
    /// All there is.
    pub const DUMP: u16 = 0x300;
    /// What exists is replaced.
    pub const REPLACE: u16 = 0x100;
    /// What does not exist is created.
    pub const CREATE: u16 = 0x400;
    /// Added at the end.
    pub const APPEND: u16 = 0x800;
}

fn aligned(length: usize) -> usize {
    length.next_multiple_of(4)
}
