//! Fixtures, and the harness that runs tests in the machine.
//!
//! * [`lab`]: a machine for tests, booted once and shared, and programs in it.
//! * [`libtest`]: runs Rust test binaries in the machine and adds up their results.
//! * [`intel`]: a machine with an emulated Intel processor, for kvm-intel.
//! * [`host_kernel`]: Debian's kernels for the machine.
//! * [`icount`]: the instruction clock.
//! * [`monitor`]: talks to `jiffy-vmm` without a node.
//! * [`slowest`]: reports the slowest tests.

pub mod host_kernel;
pub mod icount;
pub mod intel;
pub mod lab;
pub mod libtest;
pub mod monitor;
pub mod slowest;

pub use lab::{Lab, LabOptions, MOST_SHARED, Output, Run, Running, dist};
