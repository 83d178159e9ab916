//! What can be wrong with a device.

use crate::disk_chunks::ResidencyError;
use crate::hypervisor::HypervisorError;
use jiffy_devices::bus::RangeTaken;
use jiffy_devices::fw_cfg::FwCfgError;
use jiffy_devices::serial::SerialError;
use jiffy_devices::virtio::balloon;
use jiffy_devices::virtio::block::{self, BlockError};
use jiffy_devices::virtio::mmio::{self, StillRunning};
use jiffy_devices::virtio::net::{self, NetError};
use jiffy_devices::virtio::vsock::VsockError;
use jiffy_wire::mac::Mac;
use std::io;
use std::path::PathBuf;
use thiserror::Error;

/// A device could not be made, saved or restored.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// A disk.
    #[error(transparent)]
    Block(#[from] BlockError),
    /// A saved disk.
    #[error(transparent)]
    BlockRestore(#[from] block::RestoreError),
    /// A disk that is filled on demand.
    #[error(transparent)]
    Residency(#[from] ResidencyError),
    /// The vsock device.
    #[error(transparent)]
    Vsock(#[from] VsockError),
    /// fw_cfg.
    #[error(transparent)]
    FwCfg(#[from] FwCfgError),
    /// A fw_cfg file on disk.
    #[error("the fw_cfg file {} can't be read", path.display())]
    FwCfgRead {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A saved balloon.
    #[error(transparent)]
    Balloon(#[from] balloon::RestoreError),
    /// A network interface.
    #[error(transparent)]
    Net(#[from] NetError),
    /// A saved network interface.
    #[error(transparent)]
    NetRestore(#[from] net::RestoreError),
    /// What was to be left open for one.
    #[error("descriptor {number} of the network interface {mac} is not open")]
    NetDescriptor {
        /// Which interface.
        mac: Mac,
        /// Which descriptor.
        number: i32,
    },
    /// Where passt should listen.
    #[error("passt does not answer on {}", path.display())]
    Passt {
        /// Its socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The serial port.
    #[error(transparent)]
    Serial(#[from] SerialError),
    /// Where the serial port writes.
    #[error("the console file {} can't be opened", path.display())]
    Console {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A saved transport.
    #[error(transparent)]
    Transport(#[from] mmio::RestoreError),
    /// Saved while running.
    #[error(transparent)]
    StillRunning(#[from] StillRunning),
    /// Two devices at one address: ours, not the user's, mistake.
    #[error(transparent)]
    Address(#[from] RangeTaken),
    /// The saved VM has other devices.
    #[error("the saved VM and the configuration differ in {0}")]
    StateDiffers(&'static str),
    /// An event descriptor.
    #[error("an event descriptor for a device could not be made")]
    Event(#[source] io::Error),
    /// KVM.
    #[error(transparent)]
    Hypervisor(#[from] HypervisorError),
}

impl DeviceError {
    /// What the user can do.
    pub fn hint(&self) -> Option<String> {
        match self {
            DeviceError::Block(error)
            | DeviceError::BlockRestore(block::RestoreError::Open(error)) => error.hint(),
            DeviceError::Hypervisor(error) => error.hint(),
            _ => None,
        }
    }
}
