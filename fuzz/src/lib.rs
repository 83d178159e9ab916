//! Fuzz targets for all code that takes hostile bytes.
//!
//! A target is a module of [`targets`] with the same name, and a line in [`TARGETS`].
//! `fuzz/run` runs it under libFuzzer; the test `corpus` calls it with the inputs in
//! `fuzz/corpus` and `fuzz/regressions`.
//!
//! * [`targets`]: one module each.
//! * [`input`]: a fuzzer's bytes as numbers.
//! * [`queue`]: a script for the driver of a virtqueue.
//! * [`scratch`]: a folder for files and sockets.

pub mod input;
pub mod queue;
pub mod scratch;
pub mod targets;

pub use targets::TARGETS;

/// A function that is called with any bytes, and panics if an invariant does not hold.
#[derive(Clone, Copy)]
pub struct Target {
    /// The name of its module.
    pub name: &'static str,
    /// The files and folders, from the checkout's top, whose code these bytes reach.
    pub covers: &'static [&'static str],
    /// Seeds: valid inputs, written by today's code.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Called with one input.
    pub run: fn(&[u8]),
}

/// The target of that name.
pub fn find(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}
