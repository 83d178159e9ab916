//! Interrupts: the in-kernel controllers' state, and the timer chip.

mod chips;
mod pit;

pub use chips::ChipsState;
pub use pit::LazyPit;
