//! Starts a program that an attacker may take over: with an unused user id, its own namespaces, an
//! empty root, limits, a clean environment, and only the descriptors that it was given.
//!
//! * [`launch`]: starts a program in a jail; finds out which jails work on this host.
//! * [`level`]: how strong a jail is.
//! * [`access`]: which sockets it may connect to.
//! * [`identity`]: user ids, one for each program.
//! * [`cgroup`]: a control group for each program, and its limits.
//! * [`limits`]: resource limits of a process.
//! * [`confine`]: self-confinement of a process.
//! * [`rooted`]: self-confinement of a process that serves one folder.
//! * `mounts`: mounts without a place.
//! * `child`: the steps of the new process before it executes the program.
//! * `clone`: starts the new process.
//!
//! [docs/security.md](../../../docs/security.md) describes what a jail is for, and what it does not
//! protect from.

pub mod access;
pub mod cgroup;
mod child;
mod clone;
pub mod confine;
pub mod identity;
pub mod launch;
pub mod level;
pub mod limits;
mod mounts;
pub mod rooted;

pub use cgroup::{Cgroup, Cgroups, Share};
pub use identity::{Identities, Identity};
pub use launch::{FIRST_DESCRIPTOR, Jail, LaunchError, Program};
pub use level::Level;
pub use limits::Limits;
