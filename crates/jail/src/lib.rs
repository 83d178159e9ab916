//! Starts a program that may be taken over: as nobody, in namespaces of its own, with
//! an empty root, limits, a clean environment, and the descriptors it was handed.
//!
//! * [`launch`]: the program, its jail, and the start of both.
//! * [`level`]: how much of a jail this host can give.
//! * [`access`]: which sockets it may connect to.
//! * [`identity`]: user ids, one for each program.
//! * [`cgroup`]: a control group for each program, and what it may use.
//! * [`limits`]: what it may use of what the kernel counts for a process.
//! * `child`: what the new process does before it executes the program.
//! * `clone`: the new process.
//!
//! [docs/security.md](../../../docs/security.md) says what a jail is for, and what it
//! does not hold.

pub mod access;
pub mod cgroup;
mod child;
mod clone;
pub mod identity;
pub mod launch;
pub mod level;
pub mod limits;

pub use cgroup::{Cgroup, Cgroups, Share};
pub use identity::{Identities, Identity};
pub use launch::{FIRST_DESCRIPTOR, Jail, LaunchError, Program};
pub use level::Level;
pub use limits::Limits;
