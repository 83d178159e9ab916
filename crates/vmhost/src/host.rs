//! Resources shared by the tasks of all VMs.

use crate::events::EventBus;
use crate::jails::Launcher;
use crate::network::Network;
use crate::pager::Pager;
use crate::scheduler::Scheduler;
use crate::spares::Spares;
use jiffy_content::paths::Paths;
use jiffy_content::room::memory::Room;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

/// Resources that every VM's task uses.
#[derive(Debug)]
pub struct Host {
    /// Where files are.
    pub paths: Paths,
    /// Boot id of the host's kernel.
    pub clock: String,
    /// How long a guest has to become ready.
    pub start_timeout: Duration,
    /// The pager.
    pub pager: Arc<Pager>,
    /// Starts VMMs.
    pub launcher: Arc<Launcher>,
    /// VMMs started ahead.
    pub spares: Arc<Spares>,
    /// The policy of the host's scheduler.
    pub scheduler: Arc<Scheduler>,
    /// The network of VMs.
    pub network: Arc<Network>,
    /// Reservations of memory and vCPUs.
    pub room: Arc<Room>,
    /// The owner of golden snapshots.
    pub goldens: Arc<dyn GoldenKeeper>,
    /// Events of VMs, images, snapshots, volumes and networks.
    pub events: EventBus,
}

/// The owner of golden snapshots.
pub trait GoldenKeeper: Debug + Send + Sync {
    /// The snapshot of this name can't be restored: no other VM may start from it.
    fn drop_damaged(&self, name: &str);
}
