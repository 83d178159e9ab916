//! nftables as the kernel speaks it (linux/netfilter/nf_tables.h): an encoder of what our
//! table needs, and of nothing else.
//!
//! * [`constants`]: the kernel's numbers.
//! * [`expression`]: what rules are made of.
//! * [`transaction`]: changes that are made all at once or not at all.
//! * [`read`]: what there is.

pub(crate) mod constants;
pub mod expression;
pub mod read;
pub mod transaction;

pub use expression::{Expression, Verdict};
pub use transaction::{Element, Hook, Set, Transaction};
