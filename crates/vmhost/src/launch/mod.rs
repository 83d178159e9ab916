//! Starting a VM's VMM.
//!
//! * `plan`: what a start needs.
//! * `config`: what the VMM and the guest are told.
//! * `handover`: what the VMM is handed open.
//! * `spawn`: the process: spawned, or a spare's, or a standby's.
//! * `spawned`: what a VM has of its VMM.
//! * `standby`: VMs restored ahead.

mod config;
mod handover;
mod plan;
mod spawn;
mod spawned;
mod standby;

pub use config::{command_line, volume_disk};
pub use plan::{Beginning, Handle, Plan, Restoring, SavedRam};
pub use spawn::{hold, spawn};
pub use spawned::Spawned;
pub use standby::Standby;
