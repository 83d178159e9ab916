//! The pager: page faults, served out of the store.
