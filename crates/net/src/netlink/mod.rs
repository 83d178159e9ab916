//! Requests to the kernel in batches, each one datagram.
//!
//! * [`batch`]: writes messages and their attributes into one buffer.
//! * [`channel`]: a socket, and the parser of the kernel's answers.

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
/// The bits of an attribute's type that are not flags (`NLA_TYPE_MASK`).
const TYPE_MASK: u16 = 0x3fff;
const NESTED: u16 = 0x8000;

/// `NLM_F_*` flags of a request.
pub mod flags {
    /// The message is a request.
    pub const REQUEST: u16 = 1;
    /// The kernel must acknowledge the message.
    pub const ACK: u16 = 4;
    /// List all objects.
    pub const DUMP: u16 = 0x300;
    /// Replace an existing object.
    pub const REPLACE: u16 = 0x100;
    /// Create a missing object.
    pub const CREATE: u16 = 0x400;
    /// Add at the end.
    pub const APPEND: u16 = 0x800;
}

fn aligned(length: usize) -> usize {
    length.next_multiple_of(4)
}
