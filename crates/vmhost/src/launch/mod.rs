//! Starts a VM's VMM.
//!
//! * `plan`: all that a start needs.
//! * `config`: the configurations of the VMM and the guest.
//! * `folders`: folders of the host, and the processes that serve them.
//! * `handover`: the descriptors passed to the VMM.
//! * `spawn`: spawns the process, or uses a spare or a standby.
//! * `spawned`: the node's end of a spawned VMM.
//! * `standby`: VMs restored ahead of time.

mod config;
mod folders;
mod handover;
mod plan;
mod spawn;
mod spawned;
mod standby;

pub use config::{command_line, volume_disk};
pub use plan::{Beginning, Handle, Plan, Restoring, SavedRam};
pub use spawn::{check_descriptors_for, hold, spawn};
pub use spawned::Spawned;
pub use standby::Standby;
