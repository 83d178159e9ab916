//! Starting a VM's VMM.
//!
//! * `plan`: what a start needs.
//! * `config`: what the VMM and the guest are told.
//! * `spawn`: the process: spawned, or a spare's, or a standby's.
//! * `standby`: VMs restored ahead.

mod config;
mod plan;
mod spawn;
mod standby;

pub use config::{command_line, volume_disk};
pub use plan::{Beginning, Handle, Plan, Restoring, SavedRam};
pub use spawn::{Spawned, spawn};
pub use standby::Standby;
