//! The driver's side, for tests and fuzzing.
//!
//! * `guest`: a guest's driver, honest or not.
//! * [`run_scenario`]: runs any bytes as actions of guest and programs.

// [`run_scenario`] needs only a part of what tests need.
#[cfg_attr(not(test), allow(dead_code))]
mod guest;
mod scenario;

#[cfg(test)]
pub(super) use guest::{EVENT_IDX, GUEST_CID, Guest};
pub use scenario::run_scenario;
