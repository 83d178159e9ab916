//! What a snapshot keeps of a transport.

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// A transport whose device is paused: registers, queues with their positions, interrupt. The
/// device saves its own state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MmioTransportState {
    /// Device type; must be that of the device it is restored to.
    pub device_type: u32,
    /// Status, as the driver wrote it.
    pub status: u32,
    /// DeviceFeaturesSel.
    pub device_features_select: u32,
    /// DriverFeaturesSel.
    pub driver_features_select: u32,
    /// Features the driver accepted.
    pub driver_features: u64,
    /// QueueSel.
    pub queue_select: u32,
    /// One entry per queue.
    pub queues: Vec<QueueState>,
    /// InterruptStatus.
    pub interrupt_status: u32,
    /// ConfigGeneration.
    pub config_generation: u32,
    /// Whether DEVICE_NEEDS_RESET is set.
    pub needs_reset: bool,
}

/// The registers and positions of one queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueState {
    /// Number of entries, as the driver wrote it.
    pub size: u32,
    /// QueueReady.
    pub ready: bool,
    /// Guest physical address of the descriptor table.
    pub descriptors: u64,
    /// Guest physical address of the available ring.
    pub driver_ring: u64,
    /// Guest physical address of the used ring.
    pub device_ring: u64,
    /// Index of the next available entry to take.
    pub next_avail: u16,
    /// Index of the next used entry to fill.
    pub next_used: u16,
}

/// Why a saved transport does not fit the device.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// The saved state belongs to another kind of device.
    #[error(
        "the saved virtio device is of type {saved}, the device to restore is of type {actual}"
    )]
    DeviceType {
        /// The type in the state.
        saved: u32,
        /// The type of the device.
        actual: u32,
    },
    /// The number of queues differs.
    #[error("the saved virtio device has {saved} queues, the device to restore has {actual}")]
    QueueCount {
        /// The number in the state.
        saved: usize,
        /// The number of the device.
        actual: usize,
    },
    /// The driver relies on features this device does not offer.
    #[error("the saved virtio driver uses features {0:#x} that this device does not offer")]
    Features(u64),
    /// The driver could not have reached these status bits.
    #[error("the saved virtio device status {0:#x} is impossible")]
    Status(u32),
    /// An event descriptor could not be created.
    #[error("an event descriptor for a virtio device could not be created")]
    Event(#[source] std::io::Error),
}
