//! What the fuzz targets share.
//!
//! * [`input`]: a fuzzer's bytes as numbers.
//! * [`queue`]: a script for the driver of a virtqueue.
//! * [`seeds`]: inputs to begin with.

pub mod input;
pub mod queue;
pub mod seeds;
