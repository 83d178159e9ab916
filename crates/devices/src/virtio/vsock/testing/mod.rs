//! The driver's side, for tests and fuzzing.
//!
//! * `guest`: a guest's driver, honest or not.
//! * [`play`]: interprets any bytes as actions of guest and programs.

// [`play`] needs only a part of what tests need.
#[cfg_attr(not(test), allow(dead_code))]
mod guest;
mod story;

#[cfg(test)]
pub(super) use guest::{EVENT_IDX, GUEST_CID, Guest};
pub use story::play;
