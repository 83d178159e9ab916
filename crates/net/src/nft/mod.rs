//! The netlink protocol of nftables (linux/netfilter/nf_tables.h), as far as Jiffy's table needs
//! it.
//!
//! * [`constants`]: the kernel's numbers.
//! * [`expression`]: the expressions of rules.
//! * [`transaction`]: changes that are applied atomically.
//! * [`read`]: reads tables, sets and chains.

pub(crate) mod constants;
pub mod expression;
pub mod read;
pub mod transaction;

pub use expression::{Expression, Verdict};
pub use transaction::{Each, Element, Hook, Set, Transaction};
