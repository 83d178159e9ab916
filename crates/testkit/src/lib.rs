//! Fixtures and the harness that runs tests in the machine.
//!
//! * [`lab`]: a machine for tests, booted once and used by all of them.
//! * [`run`]: programs in it, with their input, output and end.
//! * [`libtest`]: Rust test binaries run inside, their counts brought out.
//! * [`icount`]: the clock that counts instructions.

pub mod icount;
pub mod lab;
pub mod libtest;
pub mod run;

pub use lab::{Lab, LabOptions, MOST_SHARED};
pub use run::{Output, Run, Running};
