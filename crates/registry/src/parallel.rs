//! A few things at a time.
