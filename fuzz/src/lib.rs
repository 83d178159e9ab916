//! Fuzz targets for everything hostile bytes can reach.
//!
//! A target is a module of [`targets`] that is called as it is, with its line in
//! [`TARGETS`]. `fuzz/run` has libFuzzer call it with what it makes up; the test
//! `corpus` calls it with the inputs in `fuzz/corpus` and `fuzz/regressions`.
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

/// Something that is called with any bytes. It panics when what must hold does not.
#[derive(Clone, Copy)]
pub struct Target {
    /// As its module.
    pub name: &'static str,
    /// The files and folders, from the checkout's top, whose code these bytes reach.
    pub covers: &'static [&'static str],
    /// Inputs to begin with, which follow the format as the code writes it today.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Is called with one input.
    pub run: fn(&[u8]),
}

/// The target of that name.
pub fn find(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}
