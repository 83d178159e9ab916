//! The plan of a start: the same for a boot, a restore and a wake.

use super::standby::Standby;
use crate::network::Attachment;
use crate::pager::Serving;
use jiffy_content::clock::monotonic_ns;
use jiffy_content::model::vm::{Paged, Root};
use jiffy_content::room::memory::Reserved;
use jiffy_content::volumes::Lease;
use jiffy_wire::api::Origin;
use jiffy_wire::vmm::{Disk, Extent};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

/// Everything that a start needs, looked up and locked.
#[derive(Debug)]
pub struct Plan {
    /// The kernel.
    pub kernel: PathBuf,
    /// Its root file system.
    pub root: Root,
    /// The VM's disks, the root file system first.
    pub disks: Vec<Disk>,
    /// Volumes, held while the VM runs.
    pub volumes: Vec<Lease>,
    /// Boot or restore.
    pub beginning: Beginning,
    /// A VM restored ahead of time that this one may take over.
    pub standby: Option<Standby>,
    /// Its attachment to the network, if it has one.
    pub network: Option<Attachment>,
    /// Its reservation of memory; `None` for background work, which holds its reservation
    /// elsewhere.
    pub room: Option<Reserved>,
    /// It is background work, with low priority.
    pub low_priority: bool,
    /// When the request arrived, host CLOCK_MONOTONIC in nanoseconds.
    pub received_ns: u64,
    /// When the lookup began, host CLOCK_MONOTONIC in nanoseconds.
    pub lookup_ns: u64,
    /// When the lookup ended, host CLOCK_MONOTONIC in nanoseconds.
    pub ready_ns: u64,
}

/// How a VM starts.
#[derive(Debug, Clone)]
pub enum Beginning {
    /// The kernel boots.
    Boot,
    /// A captured VM is restored, as a new VM or (on wake) as the same one.
    Restore(Box<Restoring>),
}

/// A captured VM to restore.
#[derive(Debug, Clone)]
pub struct Restoring {
    /// Snapshot or parent that this VM's memory came from; `None` on wake.
    pub origin: Option<Origin>,
    /// State of vCPUs, interrupt controllers and devices.
    pub state: Handle,
    /// RAM.
    pub memory: SavedRam,
    /// Ranges that the guest writes to soon after the restore, if known.
    pub prefault: Vec<Extent>,
    /// Ranges that the guest reads soon after the restore, if known.
    pub map_ahead: Vec<Extent>,
    /// Reads no page of RAM that is not accessed.
    pub no_readahead: bool,
    /// The VM's first command is a new one that must be started.
    pub start_main: bool,
    /// The golden snapshot's name, if it is one.
    pub golden: Option<String>,
}

/// A file of a captured VM.
#[derive(Debug, Clone)]
pub enum Handle {
    /// Its path.
    Path(PathBuf),
    /// It is open, to be inherited.
    Open(Arc<OwnedFd>),
}

/// RAM of a captured VM.
#[derive(Debug, Clone)]
pub enum SavedRam {
    /// Files to map.
    Mapped {
        /// The lowest first.
        layers: Vec<Handle>,
        /// The ranges of the layers.
        layout: Option<Handle>,
    },
    /// The pager serves it.
    Paged {
        /// Where the pager listens for this VM.
        serving: Serving,
        /// The memory that it serves.
        paged: Paged,
    },
}

impl Restoring {
    /// Restores a VM with this origin; without an origin, continues the same VM.
    pub fn new(origin: Option<Origin>, state: Handle, memory: SavedRam) -> Restoring {
        Restoring {
            origin,
            state,
            memory,
            prefault: Vec::new(),
            map_ahead: Vec::new(),
            no_readahead: false,
            start_main: false,
            golden: None,
        }
    }
}

impl SavedRam {
    /// Raw RAM in this file.
    pub fn of_file(path: PathBuf) -> SavedRam {
        SavedRam::Mapped {
            layers: vec![Handle::Path(path)],
            layout: None,
        }
    }
}

impl Plan {
    /// The plan of a start whose request and lookup began at these times (monotonic nanoseconds);
    /// the lookup ends now. The caller adds volumes, memory and a standby.
    pub fn new(
        kernel: PathBuf,
        root: Root,
        disks: Vec<Disk>,
        beginning: Beginning,
        (received_ns, lookup_ns): (u64, u64),
    ) -> Plan {
        Plan {
            kernel,
            root,
            disks,
            volumes: Vec::new(),
            beginning,
            standby: None,
            network: None,
            room: None,
            low_priority: false,
            received_ns,
            lookup_ns,
            ready_ns: monotonic_ns(),
        }
    }

    /// Does the start wake a hibernated VM?
    pub fn wakes(&self) -> bool {
        matches!(&self.beginning, Beginning::Restore(restoring) if restoring.origin.is_none())
    }

    /// The ticket for [`crate::pager::Pager::forget`], if the pager serves its memory.
    pub fn ticket(&self) -> Option<u64> {
        match &self.beginning {
            Beginning::Restore(restoring) => match &restoring.memory {
                SavedRam::Paged { serving, .. } => Some(serving.ticket),
                SavedRam::Mapped { .. } => None,
            },
            Beginning::Boot => None,
        }
    }

    /// The plan to boot instead, if the golden snapshot can't be restored.
    pub fn fallback(&self) -> Option<Plan> {
        match &self.beginning {
            Beginning::Restore(restoring) if restoring.golden.is_some() => Some(Plan {
                kernel: self.kernel.clone(),
                root: self.root.clone(),
                disks: self.disks.clone(),
                volumes: Vec::new(),
                beginning: Beginning::Boot,
                standby: None,
                network: None,
                room: None,
                ..*self
            }),
            _ => None,
        }
    }
}
