//! Figures and pictures of an image.
//!
//! * [`summary`]: figures by kind.
//! * [`map`](mod@map): the address space as text.
//! * [`picture`]: the address space as a PNG.

pub mod map;
pub mod picture;
pub mod summary;
#[cfg(test)]
mod tests;

pub use map::map;
pub use picture::png;
pub use summary::{KindSummary, Summary};
