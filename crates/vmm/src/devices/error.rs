//! Errors of devices.

use super::disk_chunks::ResidencyError;
use super::folder_session::SessionError;
use crate::hypervisor::HypervisorError;
use jiffy_devices::bus::RangeTaken;
use jiffy_devices::fw_cfg::FwCfgError;
use jiffy_devices::serial::SerialError;
use jiffy_devices::virtio::balloon;
use jiffy_devices::virtio::block::{self, BlockError};
use jiffy_devices::virtio::fs::{self, FsError};
use jiffy_devices::virtio::mmio::{self, NotPaused};
use jiffy_devices::virtio::net::{self, NetError};
use jiffy_devices::virtio::vsock::VsockError;
use jiffy_wire::mac::Mac;
use std::io;
use std::path::PathBuf;
use thiserror::Error;

/// Why a device could not be created, saved or restored.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// A disk can't be used.
    #[error(transparent)]
    Block(#[from] BlockError),
    /// A disk's saved state is not valid.
    #[error(transparent)]
    BlockRestore(#[from] block::RestoreError),
    /// The map of a disk that is filled on demand can't be used.
    #[error(transparent)]
    Residency(#[from] ResidencyError),
    /// The vsock device can't be created.
    #[error(transparent)]
    Vsock(#[from] VsockError),
    /// A fw_cfg file is not valid.
    #[error(transparent)]
    FwCfg(#[from] FwCfgError),
    /// A fw_cfg file on the host can't be read.
    #[error("the fw_cfg file {} can't be read", path.display())]
    FwCfgRead {
        /// The file's path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A balloon's saved state is not valid.
    #[error(transparent)]
    Balloon(#[from] balloon::RestoreError),
    /// A balloon's target is not valid.
    #[error(transparent)]
    BalloonTarget(#[from] balloon::TargetError),
    /// A network interface can't be used.
    #[error(transparent)]
    Net(#[from] NetError),
    /// A network interface's saved state is not valid.
    #[error(transparent)]
    NetRestore(#[from] net::RestoreError),
    /// A descriptor that should be open for an interface is not.
    #[error("descriptor {number} of the network interface {mac} is not open")]
    NetDescriptor {
        /// The interface's MAC address.
        mac: Mac,
        /// The descriptor's number.
        number: i32,
    },
    /// passt does not listen on its socket.
    #[error("passt does not answer on {}", path.display())]
    Passt {
        /// Its socket.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A shared folder can't be used.
    #[error(transparent)]
    Fs(#[from] FsError),
    /// A shared folder's saved state is not valid.
    #[error(transparent)]
    FsRestore(#[from] fs::RestoreError),
    /// The descriptor that should be open for a shared folder is not.
    #[error("descriptor {number} of the shared folder {tag} is not open")]
    FsDescriptor {
        /// The folder's tag.
        tag: String,
        /// The descriptor's number.
        number: i32,
    },
    /// What a guest knows of a shared folder's files can't be saved or restored.
    #[error("what the guest knows of the shared folder {0} can't be saved or restored")]
    FsSession(String, #[source] SessionError),
    /// The serial port's saved state is not valid.
    #[error(transparent)]
    Serial(#[from] SerialError),
    /// The console's file can't be opened.
    #[error("the console file {} can't be opened", path.display())]
    Console {
        /// The file's path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A transport's saved state is not valid.
    #[error(transparent)]
    Transport(#[from] mmio::RestoreError),
    /// A device was saved while it ran.
    #[error(transparent)]
    NotPaused(#[from] NotPaused),
    /// Two devices have the same address: a bug of Jiffy.
    #[error(transparent)]
    Address(#[from] RangeTaken),
    /// The saved VM has other devices than the configuration.
    #[error("the saved VM and the configuration differ in {0}")]
    StateDiffers(&'static str),
    /// An event descriptor can't be created.
    #[error("an event descriptor for a device could not be created")]
    Event(#[source] io::Error),
    /// KVM refused a call.
    #[error(transparent)]
    Hypervisor(#[from] HypervisorError),
}

impl DeviceError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            DeviceError::Block(error)
            | DeviceError::BlockRestore(block::RestoreError::Open(error)) => error.hint(),
            DeviceError::Hypervisor(error) => error.hint(),
            _ => None,
        }
    }
}
